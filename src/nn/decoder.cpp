// SPDX-License-Identifier: Apache-2.0
#include "nn/decoder.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <utility>

#include "core/check.hpp"
#include "nn/weight_stream.hpp"
#include "ops/device_memory.hpp"
#include "ops/norm.hpp"

namespace qlorapp {
namespace {

std::shared_ptr<WeightStream> stream_of(at::Device device, const std::vector<DecoderBlock::Weights>& blocks,
                                        const std::shared_ptr<Communicator>& ranks) {
  std::vector<WeightStream::Source> sources;
  for (const DecoderBlock::Weights& block : blocks)
    sources.push_back({ranks ? block.part : block.on_host, forms_of(block.projections)});
  return std::make_shared<WeightStream>(device, std::move(sources), ranks);
}

/// Of the blocks: the tables may be a rank's rows.
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
      ranks_(std::move(weights.ranks)) {
  const std::vector<int64_t> table{config_.vocab_size, config_.hidden_size};
  const std::vector<int64_t> part{rows_of_part(config_.vocab_size, ranks_ ? ranks_->size() : 1), config_.hidden_size};
  const auto fits = [&](const at::Tensor& rows) { return rows.sizes() == table || rows.sizes() == part; };
  QLORAPP_CHECK_VALUE(fits(embed_tokens_) && fits(lm_head_),
                      "[causal_lm] embedding and head must be (vocab_size, hidden_size) = {}; got {} and {}.", joined(table),
                      joined(embed_tokens_.sizes()), joined(lm_head_.sizes()));
  QLORAPP_CHECK_VALUE(std::ssize(weights.blocks) == config_.num_hidden_layers,
                      "[causal_lm] the config has {} layers; got weights of {}.", config_.num_hidden_layers, weights.blocks.size());
  const bool elsewhere = ranks_ || (!weights.blocks.empty() && weights.blocks.front().on_host.defined());
  if (elsewhere) stream_ = stream_of(device(), weights.blocks, ranks_);
  check_shapes(config_, weights);
  for (auto& block : weights.blocks)
    blocks_.emplace_back(BlockShape::of(config_, std::ssize(blocks_)), std::move(block), std::ssize(blocks_));
  if (device().is_cpu() && dtype() != at::kFloat) ops::bound_primitive_cache();  // of dense layers, too
  rope_ = RopeTables(config_.ropes, device());
  embedding_factor_ = config_.embedding_factor();
  // transformers rounds Gemma's factor to the dtype of the table, Granite's not.
  if (config_.family->scales_embedding) embedding_factor_ = at::scalar_tensor(embedding_factor_, dtype()).item<double>();
}

const at::Tensor& Decoder::own_dense(const format::Parameter& parameter) const {
  if (parameter.role == format::Role::kEmbedding) return embed_tokens_;
  if (parameter.role == format::Role::kHead) return lm_head_;
  return parameter.layer < 0 ? norm_ : blocks_[static_cast<size_t>(parameter.layer)].weights().dense[parameter.slot];
}

std::tuple<at::Tensor, at::Tensor> Decoder::last_norm(const at::Tensor& x) const {
  return ops::rms_norm(x, norm_, config_.rms_norm_eps, config_.family->norm_rule);
}

void Decoder::replace_tables(at::Tensor embed_tokens, at::Tensor lm_head) {
  QLORAPP_CHECK_VALUE(!ranks_,
                      "[causal_lm] tables of a base that is divided over ranks (base_sharding) cannot be replaced. Load the "
                      "whole base.");
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
    embed_tokens_ = ranks_ ? own_part(embed_tokens_).to(device()) : embed_tokens_.to(device());
    return;
  }
  const at::Tensor table = ops::empty_on_host({config_.vocab_size, config_.hidden_size}, dtype(), device());
  const at::Tensor values = embed_tokens();
  if (!device().is_meta()) table.copy_(values);
  embed_tokens_ = table;
}

/// For as long as it is used: exchanging a table takes a hundredth of a step, and the places of blocks are smaller.
at::Tensor Decoder::whole(const at::Tensor& table) const {
  if (!is_part(table)) return table;
  const at::NoGradGuard no_grad;
  const ops::MemoryUseScope use(ops::MemoryUse::kDense);
  at::Tensor all = at::empty({ranks_->size() * table.size(0), table.size(1)}, table.options());
  ranks_->all_gather_into(all, table).wait();
  return all.narrow(0, 0, config_.vocab_size);
}

at::Tensor Decoder::own_part(const at::Tensor& table) const {
  const int64_t rows = rows_of_part(table.size(0), ranks_->size()), begin = ranks_->rank() * rows;
  at::Tensor part = at::zeros({rows, table.size(1)}, table.options());
  const int64_t count = std::clamp(table.size(0) - begin, int64_t{0}, rows);
  if (count > 0) part.narrow(0, 0, count).copy_(table.narrow(0, begin, count));
  return part;
}

void Decoder::move_blocks(bool to_host) {
  QLORAPP_CHECK_VALUE(!(to_host && ranks_),
                      "[causal_lm] base_on_host must be without base_sharding; got both. Leave one of them out.");
  if (to_host == blocks_on_host()) return;
  // All blocks are copied before one of them changes, so a failure leaves the model as it is.
  std::vector<DecoderBlock::Weights> moved;
  for (const DecoderBlock& block : blocks_) moved.push_back(block.moved(to_host));
  stream_ = to_host ? stream_of(device(), moved, nullptr) : nullptr;
  for (size_t i = 0; i < blocks_.size(); ++i) blocks_[i].replace_weights(std::move(moved[i]));
}

const BlockWeights& Decoder::projections(int64_t block) const {
  return ranks_ ? stream_->at(block, /*training=*/false) : blocks_[static_cast<size_t>(block)].weights().projections;
}

void Decoder::replace_projection(int64_t block, Projection projection, FrozenWeight weight) {
  DecoderBlock& own = blocks_[static_cast<size_t>(block)];
  if (!ranks_) return own.replace_projection(projection, std::move(weight));
  const at::NoGradGuard no_grad;
  at::Tensor part = own.weights().part;
  const at::Tensor piece = at::empty({ranks_->size() * part.numel()}, part.options());
  ranks_->all_gather_into(piece, part).wait();
  copy_weight(views_of(piece, forms_of(own.weights().projections))[index(projection)], weight);
  part.copy_(piece.narrow(0, ranks_->rank() * part.numel(), part.numel()));
  if (own.in_float8()) own.set_float8(own.float8_ones(), projections(block));
}

int64_t Decoder::parameter_count() const { return format::parameter_count(config_); }

Bytes Decoder::weight_bytes() const {
  Bytes total{static_cast<int64_t>(norm_.nbytes())};
  if (embed_tokens_.device() == device()) total += Bytes{static_cast<int64_t>(embed_tokens_.nbytes())};
  if (!lm_head_.is_alias_of(embed_tokens_)) total += Bytes{static_cast<int64_t>(lm_head_.nbytes())};
  for (const DecoderBlock& block : blocks_) {
    for (const at::Tensor& norm : block.weights().dense) total += Bytes{static_cast<int64_t>(norm.nbytes())};
    if (block.weights().part.defined()) total += Bytes{static_cast<int64_t>(block.weights().part.nbytes())};
    if (stream_) continue;
    for (const FrozenWeight& weight : block.weights().projections) total += weight.nbytes();
  }
  if (stream_) total += stream_->device_bytes();
  return total;
}

}  // namespace qlorapp
