// SPDX-License-Identifier: Apache-2.0
/// A trained model for other programs: one GGUF file for llama.cpp, Ollama and LM Studio, with tokenizer and chat template.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "qlorapp/io/merge.hpp"

namespace qlorapp {

struct GgufOptions {
  /// F32, F16, BF16, Q8_0, Q6_K, Q5_K_M, Q4_K_M or Q4_0, as llama.cpp names them. Norms, biases and rope factors are in float32 in all of
  /// them. *_M stores the head, and values and down projections of half of the layers, in Q6_K, as llama.cpp does. Rows that are no whole
  /// number of 256 are stored in Q8_0, of 32 in F16.
  std::string type = "Q4_K_M";
  /// Jinja in place of the folder's own template; empty: that one.
  std::string chat_template;
  MergeOptions merge;  ///< base, quantization, skip_modules and progress; the others have no meaning here.
};

/// The names that GgufOptions::type may have.
[[nodiscard]] std::span<const std::string_view> gguf_types();

/// Writes model, or model and adapter merged, to `file`; one tensor is in memory at a time. The file appears whole or not at all; room for it
/// is claimed before the first tensor.
/// @param adapter  a PEFT folder, whose tokenizer and template go before the model's; empty: none.
/// @throws UnsupportedModel for a family or an option of it that llama.cpp does not compute, before anything is written; FormatError,
///         ValueError, IoError as merge_adapter, and for a tokenizer that llama.cpp does not know.
void export_gguf(const std::string& model, const std::string& adapter, const std::string& file, const GgufOptions& options = {});

}  // namespace qlorapp
