// SPDX-License-Identifier: Apache-2.0
#include "nn/base_store.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <utility>

#include "core/check.hpp"
#include "ops/memory_tape.hpp"

namespace qlorapp {

Residency residency_of(std::string_view where, bool base_on_host, std::string_view base_sharding) {
  const bool is_sharded = base_sharding != "no";
  QLORAPP_CHECK_VALUE(!(base_on_host && is_sharded),
                      "{}base_sharding={} must be without base_on_host; got both. Leave one of them out.", where, base_sharding);
  return base_on_host ? Residency::kHost : is_sharded ? Residency::kSharded : Residency::kResident;
}

std::string_view sharding_over(const Communicator* ranks) { return ranks == nullptr ? "no" : ranks->whole() ? "node" : "full"; }

std::string_view obstacle_to_graphs(Residency residency) {
  if (residency == Residency::kResident) return {};
  return residency == Residency::kHost ? "base_on_host, whose copies go on from one micro-step to the next"
                                       : "base_sharding, whose exchanges go on from one micro-step to the next";
}

at::Tensor shard_of(const at::Tensor& whole, const Communicator& ranks) {
  const int64_t rows = shard_rows(whole.size(0), ranks.size()), begin = ranks.rank() * rows;
  const at::Tensor own = whole.slice(0, begin, begin + rows);
  std::vector<int64_t> sizes = whole.sizes().vec();
  sizes.front() = rows;
  at::Tensor shard = at::zeros(sizes, whole.options());
  shard.narrow(0, 0, own.size(0)).copy_(own);
  return shard;
}

at::Tensor gathered(const at::Tensor& shard, Communicator& ranks) {
  const at::NoGradGuard no_grad;
  std::vector<int64_t> sizes = shard.sizes().vec();
  sizes.front() *= ranks.size();
  at::Tensor all = at::empty(sizes, shard.options());
  ranks.all_gather_into(all, shard).wait();
  return all;
}

BaseStore::BaseStore(at::Device device, const std::vector<DecoderBlock::Weights>& blocks, std::shared_ptr<Communicator> ranks)
    : device_(device), ranks_(std::move(ranks)), stream_(stream_of(blocks)) {}

std::shared_ptr<WeightStream> BaseStore::stream_of(const std::vector<DecoderBlock::Weights>& blocks) const {
  std::vector<WeightStream::Source> sources;
  for (const DecoderBlock::Weights& block : blocks)
    if (block.piece.defined()) sources.push_back({block.piece, forms_of(block.projections)});
  return sources.empty() ? nullptr : std::make_shared<WeightStream>(device_, std::move(sources), ranks_);
}

/// For as long as it is used: exchanging a table takes a hundredth of a step, and the places of blocks are smaller.
at::Tensor BaseStore::whole(const at::Tensor& table, int64_t rows) const {
  if (!ranks_ || table.size(0) == rows) return table;
  const ops::MemoryUseScope use(ops::MemoryUse::kDense);
  return gathered(table, *ranks_).narrow(0, 0, rows);
}

void BaseStore::replace(DecoderBlock& block, Projection projection, FrozenWeight weight) const {
  if (!ranks_) return block.replace_projection(projection, std::move(weight));
  const at::NoGradGuard no_grad;
  at::Tensor shard = block.weights().piece;
  const at::Tensor piece = gathered(shard, *ranks_);
  copy_weight(views_of(piece, forms_of(block.weights().projections))[index(projection)], weight);
  shard.copy_(piece.narrow(0, ranks_->rank() * shard.numel(), shard.numel()));
  if (block.in_float8()) block.set_float8(block.float8_ones(), at(block));
}

void BaseStore::move(std::vector<DecoderBlock>& blocks, bool to_host) {
  const Residency wanted = residency_of("[causal_lm] ", to_host, sharding_over(ranks_.get()));
  if (wanted == residency()) return;
  // All blocks are copied before one of them changes, so a failure leaves the model as it is.
  std::vector<DecoderBlock::Weights> moved;
  for (const DecoderBlock& block : blocks) moved.push_back(block.moved(to_host));
  stream_ = stream_of(moved);
  for (size_t i = 0; i < blocks.size(); ++i) blocks[i].replace_weights(std::move(moved[i]));
}

Bytes BaseStore::device_bytes(const std::vector<DecoderBlock>& blocks) const {
  Bytes total = stream_ ? stream_->device_bytes() : Bytes{};
  for (const DecoderBlock& block : blocks) {
    if (ranks_) total += Bytes{static_cast<int64_t>(block.weights().piece.nbytes())};
    if (stream_) continue;
    for (const FrozenWeight& weight : block.weights().projections) total += weight.nbytes();
  }
  return total;
}

}  // namespace qlorapp
