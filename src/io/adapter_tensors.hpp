// SPDX-License-Identifier: Apache-2.0
/// What a PEFT adapter file holds, module by module, whatever the base's family.
///
///     X.lora_A.weight (r, in), X.lora_B.weight (out, r)         of a linear layer X, or one whose weight is stored as (in, out)
///     X.lora_B.bias (out)                                       lora_bias
///     X.lora_magnitude_vector (out)                             DoRA
///     X.lora_embedding_A (r, rows), X.lora_embedding_B (d, r)   of an embedding X, whose weight (rows, d) is one stored as (in, out)
///     X.weight, X.base_layer.weight, X.bias …                   trained or saved in full
///
/// Source: PEFT 0.21.2, utils/save_and_load.py and tuners/lora.
#pragma once

#include <map>
#include <string>

#include "adapter_file.hpp"

namespace qlorapp {

struct AdaptedModule {
  const format::TensorEntry *a = nullptr, *b = nullptr, *bias = nullptr, *magnitude = nullptr;
  bool embedding = false;
};

struct AdapterTensors {
  std::map<std::string, AdaptedModule> modules;             ///< By the name in memory, without PEFT's prefix.
  std::map<std::string, const format::TensorEntry*> saved;  ///< Whole tensors, by theirs: "lm_head.weight".
};

/// @throws FormatError naming the tensor: an unknown one, half a pair, two that have no product, not floating.
[[nodiscard]] AdapterTensors adapter_tensors(const AdapterFile& adapter);

}  // namespace qlorapp
