// SPDX-License-Identifier: Apache-2.0
/// Which input channels of a model's linear layers matter on some rows, so that export_model() rounds the weights of these more closely.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "qlorapp/data/dataset.hpp"
#include "qlorapp/io/export.hpp"
#include "qlorapp/nn/causal_lm.hpp"

namespace qlorapp {

/// Runs the rows through the model. @param rows  as evaluate() takes them.
/// @throws ValueError as evaluate(). Synchronizes.
[[nodiscard]] Importance measure_importance(CausalLM& model, const std::vector<Example>& rows);

struct ImportanceOptions {
  bool load_in_4bit = true;      ///< A base in 16 or 32 bits is in NF4 with double quantization, as in training.
  at::Device device = at::kCPU;  ///< One model is in memory.
  int64_t most_rows = 512;       ///< Of the file's, evenly spaced.
  int64_t max_length = 1024;     ///< Rows are cut to this many tokens.
};

/// Of a model with its adapter.
/// @param model    a folder, or that of a GGUF file.  @param adapter  a PEFT folder; empty: none.
/// @param data     file of rows, as train reads them.
/// @throws ValueError, FormatError, IoError as load_model, load_adapter and Dataset::read.
[[nodiscard]] Importance measure_importance(const std::string& model, const std::string& adapter, const std::string& data,
                                            const ImportanceOptions& options);

}  // namespace qlorapp
