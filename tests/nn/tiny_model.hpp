// SPDX-License-Identifier: Apache-2.0
/// A four-block model with random weights and adapters, and the loss and gradients of its plain dense twin.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "nn/decoder.hpp"
#include "nn/step_context.hpp"
#include "nn/tiny_block.hpp"
#include "qlorapp/nn/causal_lm.hpp"

namespace tiny {

inline const char* const kConfigJson = R"({
  "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 48, "intermediate_size": 88, "num_hidden_layers": 4,
  "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 67, "rms_norm_eps": 1e-5, "hidden_act": "silu",
  "max_position_embeddings": 64, "rope_theta": 10000.0, "tie_word_embeddings": false, "torch_dtype": "float32"})";

/// The config above with another block's sizes and depth.
inline qlorapp::format::ModelConfig make_config(const qlorapp::DecoderBlock::Shape& shape, int64_t layers) {
  qlorapp::format::ModelConfig config = qlorapp::format::parse_model_config(kConfigJson, "tiny");
  config.hidden_size = shape.hidden;
  config.intermediate_size = shape.intermediate;
  config.num_attention_heads = shape.heads;
  config.num_key_value_heads = shape.kv_heads;
  config.head_dim = shape.head_dim;
  config.num_hidden_layers = layers;
  return config;
}

inline qlorapp::CausalLM make_model(at::ScalarType dtype, double dropout = 0, at::Device device = at::kCPU, int64_t layers = 4,
                                    const qlorapp::DecoderBlock::Shape& shape = kShape) {
  using namespace qlorapp;
  at::manual_seed(5);
  const format::ModelConfig config = make_config(shape, layers);
  const int64_t d = shape.hidden, q = shape.attention_width(), kv = shape.kv_heads * shape.head_dim;
  DecoderWeights weights;
  weights.embed_tokens = at::randn({config.vocab_size, d}).to(dtype).to(device);
  weights.lm_head = (at::randn({config.vocab_size, d}) * 0.3).to(dtype).to(device);
  weights.norm = (at::rand({d}) + 0.5).to(dtype).to(device);
  const std::array<std::pair<int64_t, int64_t>, 7> sizes{
      {{q, d}, {kv, d}, {kv, d}, {d, q}, {shape.intermediate, d}, {shape.intermediate, d}, {d, shape.intermediate}}};
  const Quantizer quantizer;
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    DecoderBlock::Weights block;
    for (int n = 0; n < 2; ++n) block.dense.push_back((at::rand({d}) + 0.5).to(dtype).to(device));
    for (size_t p = 0; p < 7; ++p) {
      const auto [out, in] = sizes[p];
      block.projections.emplace_back(quantizer.quantize(at::randn({out, in}) / std::sqrt(static_cast<double>(in))).to(device));
    }
    weights.blocks.push_back(std::move(block));
  }
  CausalLM model(config, std::move(weights));
  LoraConfig lora;
  lora.r = 4;
  lora.lora_alpha = 8;
  lora.lora_dropout = dropout;
  lora.target_modules = {"q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"};
  model.add_adapters(lora, 1);
  const at::NoGradGuard no_grad;
  for (const at::Tensor& parameter : model.arena().parameters()) parameter.detach().copy_(at::randn(parameter.sizes()) * 0.1);
  return model;
}

/// Three ragged rows, some targets ignored.
inline qlorapp::Batch make_batch(int64_t vocabulary) {
  at::manual_seed(6);
  qlorapp::Batch batch;
  batch.row_starts = {0, 9, 10, 24};
  batch.tokens = at::randint(vocabulary, {24}, at::kLong);
  batch.targets = at::randint(vocabulary, {24}, at::kLong);
  for (const int64_t ignored : {0, 3, 8, 9, 15, 23}) batch.targets[ignored] = -100;
  batch.positions = at::cat({at::arange(9, at::kLong), at::arange(1, at::kLong), at::arange(14, at::kLong)});
  batch.target_count = 18;
  return batch;
}

struct Expected {
  double loss;
  std::vector<reference::Matrix> gradients;  ///< In the order of the arena.
};

/// In double precision, over dense weights, logits whole.
inline Expected reference_loss_and_gradients(const qlorapp::CausalLM& model, const qlorapp::Batch& batch) {
  using namespace qlorapp;
  const Quantizer quantizer;
  reference::Model dense{matrix(model.decoder().embed_tokens()),
                         {},
                         tests::values(model.decoder().norm_weight()),
                         1e-5,
                         matrix(model.decoder().lm_head())};
  for (const DecoderBlock& block : model.blocks()) {
    const DecoderBlock::Weights& weights = block.weights();
    reference::Block& twin = dense.blocks.emplace_back(
        reference::Block{6, 2, 8, 1e-5, tests::values(weights.dense[0]), tests::values(weights.dense[1]), {}, {}});
    for (size_t i = 0; i < 7; ++i) {
      twin.weights[i] = matrix(quantizer.dequantize(weights.projections[i].quantized, at::kFloat));
      if (const auto& adapter = block.adapters()[i]) twin.lora[i] = {matrix(adapter->a), matrix(adapter->b), adapter->scaling};
    }
  }
  const reference::Rows rows = reference_rows(make_context(batch.row_starts));
  const auto found = reference::loss_and_gradients(dense, integers(batch.tokens), integers(batch.targets), {rows});
  Expected expected{found.loss, {}};
  for (const reference::BlockGradients& block : found.blocks) {
    for (const auto& [a, b] : block.lora) {
      if (a.size() > 0) expected.gradients.insert(expected.gradients.end(), {a, b});
    }
  }
  return expected;
}

}  // namespace tiny
