// SPDX-License-Identifier: Apache-2.0
/// Options of other trainers and this command's names for them: for the error about an unknown option, here and nowhere else.
#pragma once

#include <span>
#include <string_view>

namespace qlorapp::cli {

struct OtherName {
  std::string_view theirs;
  std::string_view ours;         ///< Empty: there is none.
  std::string_view advice = {};  ///< In place of it.
};

/// Names of LLaMA-Factory, axolotl, mlx-lm, unsloth, torchtune, TRL, LitGPT, the QLoRA script, and what people type without one of them. A name that
/// means different options in different commands has several rows, best first.
[[nodiscard]] std::span<const OtherName> other_names();

}  // namespace qlorapp::cli
