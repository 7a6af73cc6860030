// SPDX-License-Identifier: Apache-2.0
#include "nn/model_weights.hpp"

#include <array>
#include <string_view>
#include <utility>

#include "core/check.hpp"
#include "nn/decoder.hpp"

namespace qlorapp {
namespace {

/// Of a block's linear layers, in the order of Projection, behind "model.layers.N.".
constexpr std::array<std::string_view, kProjectionCount> kProjectionNames{
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj",    "mlp.up_proj",      "mlp.down_proj"};

void make_block(DecoderBlock::Weights& weights, const format::ModelConfig& config, const std::string& prefix,
                const WeightMaker& maker) {
  weights.input_norm = maker.dense(prefix + "input_layernorm.weight", {config.hidden_size});
  weights.post_attention_norm = maker.dense(prefix + "post_attention_layernorm.weight", {config.hidden_size});
  const int64_t q = config.num_attention_heads * config.head_dim, kv = config.num_key_value_heads * config.head_dim;
  const std::array<std::pair<int64_t, int64_t>, kProjectionCount> shapes{{{q, config.hidden_size},
                                                                          {kv, config.hidden_size},
                                                                          {kv, config.hidden_size},
                                                                          {config.hidden_size, q},
                                                                          {config.intermediate_size, config.hidden_size},
                                                                          {config.intermediate_size, config.hidden_size},
                                                                          {config.hidden_size, config.intermediate_size}}};
  for (size_t i = 0; i < kProjectionCount; ++i) {
    maker.linear(weights.projections[i], prefix + std::string(kProjectionNames[i]), shapes[i].first, shapes[i].second);
  }
}

}  // namespace

DecoderWeights make_weights(const format::ModelConfig& config, const WeightMaker& maker) {
  DecoderWeights weights;
  weights.embed_tokens = maker.dense("model.embed_tokens.weight", {config.vocab_size, config.hidden_size});
  weights.lm_head =
      config.tie_word_embeddings ? weights.embed_tokens : maker.dense("lm_head.weight", {config.vocab_size, config.hidden_size});
  weights.blocks.resize(static_cast<size_t>(config.num_hidden_layers));  // and never again: `into` keeps its place
  for (size_t i = 0; i < weights.blocks.size(); ++i) make_block(weights.blocks[i], config, message("model.layers.{}.", i), maker);
  weights.norm = maker.dense("model.norm.weight", {config.hidden_size});
  return weights;
}

}  // namespace qlorapp
