// SPDX-License-Identifier: Apache-2.0
#include "nn/model_weights.hpp"

#include "nn/decoder.hpp"

namespace qlorapp {

DecoderWeights make_weights(const format::ModelConfig& config, const WeightMaker& maker) {
  DecoderWeights weights;
  weights.blocks.resize(static_cast<size_t>(config.num_hidden_layers));
  for (DecoderBlock::Weights& block : weights.blocks) {  // and never again: `into` keeps its place
    block.projections.resize(config.family->linears.size());
  }
  for (const format::Parameter& parameter : format::parameters(config)) {
    if (parameter.role != format::Role::kLinear) {
      if (parameter.layer >= 0) weights.blocks[static_cast<size_t>(parameter.layer)].dense.resize(parameter.slot + 1);
      weights.dense(parameter) = maker.dense(parameter.name(), parameter.shape);
      continue;
    }
    FrozenWeight& into = weights.blocks[static_cast<size_t>(parameter.layer)].projections[parameter.slot];
    maker.linear(into, parameter.module, parameter.shape[0], parameter.shape[1]);
  }
  if (config.tie_word_embeddings) weights.lm_head = weights.embed_tokens;
  return weights;
}

}  // namespace qlorapp
