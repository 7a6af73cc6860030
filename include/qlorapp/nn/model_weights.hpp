// SPDX-License-Identifier: Apache-2.0
/// All weights of a model in the order in which they are made, whoever makes them: a checkpoint's reader, a generator of random
/// ones, or a plan that has shapes alone.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "qlorapp/nn/causal_lm.hpp"

namespace qlorapp {

/// Of a block's linear layers, in the order of Projection, behind "model.layers.N.".
inline constexpr std::array<std::string_view, kProjectionCount> kProjectionNames{
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj",    "mlp.up_proj",      "mlp.down_proj"};

struct WeightMaker {
  /// A weight in the compute dtype, by its name in a checkpoint: embedding, head, norms.
  std::function<at::Tensor(const std::string& name, const std::vector<int64_t>& shape)> dense;
  /// The weight of a linear layer (out, in), by the name of its module.
  std::function<FrozenWeight(const std::string& module, int64_t out, int64_t in)> linear;
};

/// The head is the embedding's tensor where the config ties them.
[[nodiscard]] CausalLM::Weights make_weights(const format::ModelConfig& config, const WeightMaker& source);

}  // namespace qlorapp
