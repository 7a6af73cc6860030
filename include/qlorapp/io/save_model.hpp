// SPDX-License-Identifier: Apache-2.0
/// A CausalLM's frozen base as a Hugging Face folder, such as transformers' save_pretrained writes: model.safetensors, config.json,
/// generation_config.json. Four-bit weights keep their very codes; a folder that was loaded comes out with the same bytes.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "qlorapp/nn/causal_lm.hpp"

namespace qlorapp {

/// The quantization_config that config.json gets if the model is quantized and its source folder was not.
struct SaveOptions {
  std::string storage = "uint8";                         ///< bnb_4bit_quant_storage: the dtype that packed bytes are shown as.
  std::optional<std::vector<std::string>> skip_modules;  ///< llm_int8_skip_modules.
  std::optional<at::ScalarType> compute_dtype;           ///< bnb_4bit_compute_dtype; float32 unless given, as in transformers.
};

/// Adapters are not written: save_adapter does that.
/// @param source  the folder that the model was loaded from: its config.json is taken over.
/// @throws ValueError if `output` is `source`, or a file; IoError.
void save_model(const CausalLM& model, const std::string& source, const std::string& output, const SaveOptions& options = {});

}  // namespace qlorapp
