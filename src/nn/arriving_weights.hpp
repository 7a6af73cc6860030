// SPDX-License-Identifier: Apache-2.0
/// Which tensor of a checkpoint becomes which weight, and how: the one arrangement of those who load a model (io/load_model.hpp) and
/// those who plan how much memory that takes (memory/planner.hpp).
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "nn/block_weights.hpp"
#include "nn/decoder.hpp"
#include "qlorapp/nn/weight_options.hpp"
#include "quant/arrival.hpp"

namespace qlorapp {

/// The interface of a checkpoint.
struct StoredWeights {
  /// Dtype of a dense tensor of this shape. @throws FormatError if there is none such.
  std::function<at::ScalarType(const std::string& name, const std::vector<int64_t>& shape)> dtype;
  /// The form of a weight that is stored in four bits; none of a dense one.
  std::function<std::optional<WeightForm>(const std::string& name, const std::vector<int64_t>& shape)> four_bit_form;
  /// Brings a weight that is stored in four bits to its places: complete when all has arrived.
  std::function<void(const std::string& name, const QuantizedTensor& places)> bring_quantized;
  /// Brings a dense one.
  std::function<void(const std::string& name, const std::vector<int64_t>& shape, Arrival arrival)> bring;
};

/// Places for all weights, and orders for all tensors; of a sharded base, for those that this rank reads. Where weights are quantized as they come, their layers are empty until they have.
/// Other layers of `weights.blocks` must not be added or moved out until then.
[[nodiscard]] DecoderWeights arrange_weights(const format::ModelConfig& config, const WeightOptions& options,
                                             const StoredWeights& stored);

/// After all tensors of all ranks have arrived: each rank keeps its shard of every block and table (WeightOptions::shard_over). Nothing
/// where the base is not sharded. @throws IoError if another rank failed to load.
void keep_own_shards(DecoderWeights& weights, const format::ModelConfig& config);

/// Whether one of the names is the module's or its trailing part, cut at a dot.
[[nodiscard]] bool names_module(const std::vector<std::string>& names, const std::string& module);

}  // namespace qlorapp
