// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/nn/rehearsal.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "qlorapp/core/check.hpp"
#include "qlorapp/nn/causal_lm.hpp"
#include "qlorapp/nn/memory_account.hpp"

namespace qlorapp {
namespace {

const at::Device kMeta(at::kMeta);

FrozenWeight linear(int64_t out, int64_t in, const RehearsalOptions& options) {
  const auto on_meta = at::TensorOptions().device(kMeta);
  if (!options.load_in_4bit) return FrozenWeight(at::empty({out, in}, on_meta.dtype(options.dtype)));
  QuantizedTensor weight;
  weight.shape = {out, in};
  weight.dtype = options.dtype;
  weight.block_size = options.block_size;
  weight.nested_block_size = options.nested_block_size;
  const int64_t blocks = (out * in + options.block_size - 1) / options.block_size;
  weight.packed = at::empty({(out * in + 1) / 2, 1}, on_meta.dtype(at::kByte));
  weight.absmax = at::empty({blocks}, on_meta.dtype(options.double_quant ? at::kByte : at::kFloat));
  if (options.double_quant) {
    const int64_t nested = (blocks + options.nested_block_size - 1) / options.nested_block_size;
    weight.nested_absmax = at::empty({nested}, on_meta.dtype(at::kFloat));
    weight.nested_offset = at::empty({}, on_meta.dtype(at::kFloat));
  }
  return FrozenWeight(std::move(weight));
}

Batch make_batch(const RehearsalOptions& options) {
  Batch batch;
  const int64_t tokens = options.rows * options.length;
  for (at::Tensor* const tensor : {&batch.tokens, &batch.targets, &batch.positions}) {
    *tensor = at::empty({tokens}, at::TensorOptions().device(kMeta).dtype(at::kLong));
  }
  for (int64_t row = 0; row <= options.rows; ++row) batch.row_starts.push_back(row * options.length);
  const int64_t targets = options.targets_of_row < 0 ? options.length - 1 : options.targets_of_row;
  batch.target_count = options.rows * targets;
  return batch;
}

}  // namespace

Bytes Rehearsal::peak() const { return std::max({forward, loss, backward}); }

CausalLM make_meta_model(const format::ModelConfig& config, const RehearsalOptions& options) {
  const auto on_meta = at::TensorOptions().device(kMeta).dtype(options.dtype);
  const int64_t d = config.hidden_size, i = config.intermediate_size;
  const int64_t q = config.num_attention_heads * config.head_dim, kv = config.num_key_value_heads * config.head_dim;
  CausalLM::Weights weights;
  weights.embed_tokens = at::empty({config.vocab_size, d}, on_meta);
  weights.lm_head = config.tie_word_embeddings ? weights.embed_tokens : at::empty({config.vocab_size, d}, on_meta);
  weights.norm = at::empty({d}, on_meta);
  const auto of = [&](int64_t out, int64_t in) { return linear(out, in, options); };
  for (int64_t block = 0; block < config.num_hidden_layers; ++block) {
    weights.blocks.push_back({at::empty({d}, on_meta),
                              at::empty({d}, on_meta),
                              {of(q, d), of(kv, d), of(kv, d), of(d, q), of(i, d), of(i, d), of(d, i)}});
  }
  return {config, std::move(weights)};
}

Rehearsal rehearse(const format::ModelConfig& config, const LoraConfig& lora, const RehearsalOptions& options) {
  QLORAPP_CHECK_VALUE(options.rows >= 1 && options.length >= 2 && options.rows <= INT64_MAX / 2 / options.length,
                      "[rehearse] a micro-batch must have rows of at least 2 tokens; got ", options.rows, " of ", options.length,
                      ".");
  QLORAPP_CHECK_VALUE(options.targets_of_row < options.length, "[rehearse] a row of ", options.length,
                      " tokens has fewer targets; got ", options.targets_of_row, ".");
  const at::NoGradGuard no_grad;
  const MemoryAccount account;
  Rehearsal result;
  CausalLM model = make_meta_model(config, options);
  model.set_memory(options.memory);
  if (!options.segments.empty()) model.set_segments(options.segments);
  result.weights = account.now();
  if (model.embed_tokens().is_cpu()) result.pinned += Bytes{static_cast<int64_t>(model.embed_tokens().nbytes())};
  model.add_adapters(lora, /*seed=*/0);
  result.adapters = account.now() - result.weights;
  const Batch batch = make_batch(options);
  const at::Tensor grad_scale = at::empty({}, batch.tokens.options().dtype(at::kFloat));
  model.forward_backward(batch, grad_scale, 0, 0);
  const auto peak_of = [&](const char* phase) { return account.peaks().find(phase)->second; };
  result.forward = peak_of("forward");
  result.loss = peak_of("loss");
  result.backward = peak_of("backward");
  if (model.pinned_ring() != nullptr) result.pinned += model.pinned_ring()->nbytes();
  return result;
}

}  // namespace qlorapp
