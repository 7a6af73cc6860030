// SPDX-License-Identifier: Apache-2.0
#include "nn/decoder.hpp"

#include <ATen/ATen.h>

#include <utility>

#include "core/check.hpp"
#include "ops/device_memory.hpp"
#include "ops/norm.hpp"

namespace qlorapp {
namespace {

/// Of the blocks: the tables may be a rank's shards.
void check_shapes(const format::ModelConfig& config, const DecoderWeights& weights) {
  for (const format::Parameter& parameter : format::parameters(config)) {
    if (parameter.layer < 0) continue;
    const DecoderBlock::Weights& block = weights.blocks[static_cast<size_t>(parameter.layer)];
    const bool is_linear = parameter.role == format::Role::kLinear;
    const size_t there = is_linear ? block.projections.size() : block.dense.size();
    const std::vector<int64_t> found =
        parameter.slot >= there ? std::vector<int64_t>{}
        : is_linear ? std::vector{block.projections[parameter.slot].out_features(), block.projections[parameter.slot].in_features()}
                    : block.dense[parameter.slot].sizes().vec();
    QLORAPP_CHECK_VALUE(found == parameter.shape, "[causal_lm] the weight of {} must be {}; got {}.", parameter.module,
                        joined(parameter.shape), joined(found));
  }
}

}  // namespace

at::Tensor& DecoderWeights::dense(const format::Parameter& parameter) {
  if (parameter.role == format::Role::kEmbedding) return embed_tokens;
  if (parameter.role == format::Role::kHead) return lm_head;
  return parameter.layer < 0 ? norm : blocks[static_cast<size_t>(parameter.layer)].dense[parameter.slot];
}

Decoder::Decoder(format::ModelConfig config, DecoderWeights weights)
    : config_(std::move(config)),
      embed_tokens_(std::move(weights.embed_tokens)),
      norm_(std::move(weights.norm)),
      lm_head_(std::move(weights.lm_head)),
      store_(device(), weights.blocks, std::move(weights.ranks)) {
  const std::vector<int64_t> table{config_.vocab_size, config_.hidden_size};
  const std::vector<int64_t> own{store_.own_rows(config_.vocab_size), config_.hidden_size};
  const auto fits = [&](const at::Tensor& rows) { return rows.sizes() == table || rows.sizes() == own; };
  QLORAPP_CHECK_VALUE(fits(embed_tokens_) && fits(lm_head_),
                      "[causal_lm] embedding and head must be (vocab_size, hidden_size) = {}; got {} and {}.", joined(table),
                      joined(embed_tokens_.sizes()), joined(lm_head_.sizes()));
  QLORAPP_CHECK_VALUE(std::ssize(weights.blocks) == config_.num_hidden_layers,
                      "[causal_lm] the config has {} layers; got weights of {}.", config_.num_hidden_layers, weights.blocks.size());
  check_shapes(config_, weights);
  if (dtype() == at::kHalf) stream_scale_ = config_.family->float16_stream_scale;
  for (auto& block : weights.blocks) {
    BlockShape shape = BlockShape::of(config_, std::ssize(blocks_));
    shape.stream_scale = stream_scale_;
    blocks_.emplace_back(shape, std::move(block), std::ssize(blocks_));
  }
  if (device().is_cpu() && dtype() != at::kFloat) ops::bound_primitive_cache();  // of dense layers, too
  rope_ = RopeTables(config_.ropes, device());
  embedding_factor_ = config_.embedding_factor();
  // transformers rounds Gemma's factor to the dtype of the table, Granite's not.
  if (config_.family->scales_embedding) embedding_factor_ = at::scalar_tensor(embedding_factor_, dtype()).item<double>();
  embedding_factor_ *= stream_scale_;
}

const at::Tensor& Decoder::own_dense(const format::Parameter& parameter) const {
  if (parameter.role == format::Role::kEmbedding) return embed_tokens_;
  if (parameter.role == format::Role::kHead) return lm_head_;
  return parameter.layer < 0 ? norm_ : blocks_[static_cast<size_t>(parameter.layer)].weights().dense[parameter.slot];
}

std::tuple<at::Tensor, at::Tensor> Decoder::last_norm(const at::Tensor& x) const {
  return ops::rms_norm(x, norm_, config_.rms_norm_eps * stream_scale_ * stream_scale_, config_.family->norm_rule);
}

void Decoder::replace_tables(at::Tensor embed_tokens, at::Tensor lm_head) {
  QLORAPP_CHECK_VALUE(!is_sharded(),
                      "[causal_lm] tables of a sharded base (base_sharding) cannot be replaced. Load the whole base.");
  QLORAPP_CHECK_VALUE(
      embed_tokens.sizes() == lm_head.sizes() && embed_tokens.dim() == 2 && embed_tokens.size(1) == config_.hidden_size,
      "[causal_lm] embedding and head must be (vocab_size, {}); got {} and {}.", config_.hidden_size, joined(embed_tokens.sizes()),
      joined(lm_head.sizes()));
  config_.vocab_size = embed_tokens.size(0);
  config_.tie_word_embeddings = lm_head.is_alias_of(embed_tokens);
  embed_tokens_ = std::move(embed_tokens);
  lm_head_ = std::move(lm_head);
}

void Decoder::move_embedding(bool to_host) {
  if (!on_gpu() || lm_head_.is_alias_of(embed_tokens_) || to_host == embedding_on_host()) return;
  if (!to_host) {
    embed_tokens_ = store_.own(embed_tokens_).to(device());
    return;
  }
  const at::Tensor table = ops::empty_on_host({config_.vocab_size, config_.hidden_size}, dtype(), device());
  const at::Tensor values = embed_tokens();
  if (!device().is_meta()) table.copy_(values);
  embed_tokens_ = table;
}

int64_t Decoder::parameter_count() const { return format::parameter_count(config_); }

Bytes Decoder::weight_bytes() const {
  Bytes total = store_.device_bytes(blocks_) + Bytes{static_cast<int64_t>(norm_.nbytes())};
  if (embed_tokens_.device() == device()) total += Bytes{static_cast<int64_t>(embed_tokens_.nbytes())};
  if (!lm_head_.is_alias_of(embed_tokens_)) total += Bytes{static_cast<int64_t>(lm_head_.nbytes())};
  for (const DecoderBlock& block : blocks_) {
    for (const at::Tensor& norm : block.weights().dense) total += Bytes{static_cast<int64_t>(norm.nbytes())};
  }
  return total;
}

}  // namespace qlorapp
