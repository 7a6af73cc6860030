// SPDX-License-Identifier: Apache-2.0
/// What a GGUF file of a model consists of: names, order and values by llama.cpp's code of the architecture that the family's row names.
///
/// Source: llama.cpp's src/models and conversion, gguf 0.19's constants.py.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "format/gguf.hpp"
#include "qlorapp/format/model_config.hpp"
#include "qlorapp/format/model_layout.hpp"

namespace qlorapp::format {

/// A tensor of the file, made of a parameter of the model.
struct GgufPart {
  std::string name;
  std::string parameter;  ///< Its name in memory; empty: `values` are the tensor.
  std::vector<int64_t> shape;
  int64_t first_row = 0;  ///< Of the parameter, of which it has shape[0] rows.
  int64_t heads = 0;      ///< Above 0: the halves of each head's rows become neighbors.
  bool adds_one = false;  ///< The norm multiplies by 1 + w.
  double factor = 1;      ///< Of the values.
  Role role = Role::kLinear;
  int64_t layer = -1;
  std::vector<float> values = {};
};

/// @throws UnsupportedModel for what llama.cpp does not compute as this model does, naming key and value.
[[nodiscard]] std::vector<GgufPart> gguf_parts(const ModelConfig& config);

/// What llama.cpp calls a linear layer of a block: "attn_q".
[[nodiscard]] std::string_view gguf_name(const Family& family, const LinearRow& row);

/// Keys of the architecture ("llama.block_count" …), in a fixed order. @throws as gguf_parts().
[[nodiscard]] GgufMetadata gguf_hyperparameters(const ModelConfig& config);

}  // namespace qlorapp::format
