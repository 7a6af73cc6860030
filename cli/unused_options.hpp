// SPDX-License-Identifier: Apache-2.0
/// Names of transformers' TrainingArguments and BitsAndBytesConfig and of PEFT's LoraConfig that the command understands and does not use:
/// scripts are copied with them. Each is answered with its reason, here and nowhere else.
#pragma once

#include <span>
#include <string_view>

namespace qlorapp::cli {

struct UnusedOption {
  std::string_view name;
  std::string_view reason;
  bool refused = false;           ///< Raises, because the run would differ from the request; else ignored, because it would not.
  std::string_view neutral = "";  ///< A value, as JSON, that changes nothing; unset, false, 0 and "" never do.
};

/// Every name that transformers has had since 4.46 and TrainingArguments (train/training_arguments.hpp) does not have.
[[nodiscard]] std::span<const UnusedOption> unused_training_arguments();
/// The names of PEFT's LoraConfig that adapters/lora_config.hpp does not have.
[[nodiscard]] std::span<const UnusedOption> unused_lora_options();
/// The names of BitsAndBytesConfig that format/bits_and_bytes_config.hpp does not have.
[[nodiscard]] std::span<const UnusedOption> unused_quantization_options();

}  // namespace qlorapp::cli
