// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/nn/model_weights.hpp"

#include <array>
#include <string_view>
#include <utility>

#include "qlorapp/core/check.hpp"

namespace qlorapp {
namespace {

DecoderBlock::Weights block_weights(const format::ModelConfig& config, const std::string& prefix, const WeightMaker& source) {
  DecoderBlock::Weights weights;
  weights.input_norm = source.dense(prefix + "input_layernorm.weight", {config.hidden_size});
  weights.post_attention_norm = source.dense(prefix + "post_attention_layernorm.weight", {config.hidden_size});
  const int64_t q = config.num_attention_heads * config.head_dim, kv = config.num_key_value_heads * config.head_dim;
  const std::array<std::pair<int64_t, int64_t>, kProjectionCount> shapes{{{q, config.hidden_size},
                                                                          {kv, config.hidden_size},
                                                                          {kv, config.hidden_size},
                                                                          {config.hidden_size, q},
                                                                          {config.intermediate_size, config.hidden_size},
                                                                          {config.intermediate_size, config.hidden_size},
                                                                          {config.hidden_size, config.intermediate_size}}};
  for (size_t i = 0; i < kProjectionCount; ++i) {
    weights.projections[i] = source.linear(prefix + std::string(kProjectionNames[i]), shapes[i].first, shapes[i].second);
  }
  return weights;
}

}  // namespace

CausalLM::Weights make_weights(const format::ModelConfig& config, const WeightMaker& source) {
  CausalLM::Weights weights;
  weights.embed_tokens = source.dense("model.embed_tokens.weight", {config.vocab_size, config.hidden_size});
  weights.lm_head =
      config.tie_word_embeddings ? weights.embed_tokens : source.dense("lm_head.weight", {config.vocab_size, config.hidden_size});
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    weights.blocks.push_back(block_weights(config, concat("model.layers.", i, "."), source));
  }
  weights.norm = source.dense("model.norm.weight", {config.hidden_size});
  return weights;
}

}  // namespace qlorapp
