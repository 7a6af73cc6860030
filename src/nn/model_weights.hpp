// SPDX-License-Identifier: Apache-2.0
/// All weights of a model in the order of their creation. The source is a checkpoint's reader, a generator of random weights, or a
/// plan that has shapes alone.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "nn/decoder.hpp"
#include "qlorapp/nn/causal_lm.hpp"

namespace qlorapp {

struct WeightMaker {
  /// A weight in the compute dtype, by its name in a checkpoint: embedding, head, norms.
  std::function<at::Tensor(const std::string& name, const std::vector<int64_t>& shape)> dense;
  /// The weight of a linear layer (out, in), by the name of its module. `into` may be filled later: it stays where it is as
  /// long as the weights live, also when they are moved.
  std::function<void(FrozenWeight& into, const std::string& module, int64_t out, int64_t in)> linear;
};

/// The head is the embedding's tensor where the config ties them.
[[nodiscard]] DecoderWeights make_weights(const format::ModelConfig& config, const WeightMaker& maker);

}  // namespace qlorapp
