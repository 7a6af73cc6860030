// SPDX-License-Identifier: Apache-2.0
/// What a GGUF file of a model consists of: names, order and values by llama.cpp's code of the architecture that the family's row names.
///
/// Source: llama.cpp's src/models and conversion, gguf 0.19's constants.py.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "format/gguf.hpp"
#include "qlorapp/format/model_config.hpp"

namespace qlorapp {

/// A tensor of the file, made of a parameter of the model.
struct GgufPart {
  std::string name;
  std::string parameter;  ///< Its name in memory; empty: `values` are the tensor.
  std::vector<int64_t> shape;
  int64_t first_row = 0;  ///< Of the parameter, of which it has shape[0] rows.
  int64_t heads = 0;      ///< Above 0: the halves of each head's rows become neighbors.
  bool adds_one = false;  ///< The norm multiplies by 1 + w.
  double factor = 1;      ///< Of the values.
  format::Role role = format::Role::kLinear;
  int64_t layer = -1;
  std::vector<float> values = {};
};

/// The rows of a part, in its order. @param values  (rows of the parameter, any), such as the weight or a low-rank factor of it.
[[nodiscard]] at::Tensor rows_of(const GgufPart& part, const at::Tensor& values);

/// @throws UnsupportedModel for what llama.cpp does not compute as this model does, naming key and value.
[[nodiscard]] std::vector<GgufPart> gguf_parts(const format::ModelConfig& config);

/// Keys of the architecture ("llama.block_count" …), in a fixed order. @throws as gguf_parts().
[[nodiscard]] format::GgufMetadata gguf_hyperparameters(const format::ModelConfig& config);

}  // namespace qlorapp
