// SPDX-License-Identifier: Apache-2.0
/// Where the frozen base is, and how its blocks and tables are read, replaced and moved there.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "nn/block/decoder_block.hpp"
#include "nn/weight_stream.hpp"

namespace qlorapp {

enum class Residency {
  kResident,  ///< On the device of the computation.
  kHost,      ///< Blocks wait in host memory (base_on_host).
  kSharded,   ///< Each rank of a run holds a shard of every block, and of the tables unless they are tied (base_sharding).
};

/// Of the options. @param where  begins the message.  @throws ValueError if they exclude each other.
[[nodiscard]] Residency residency_of(std::string_view where, bool base_on_host, std::string_view base_sharding);
/// The value of base_sharding that leads to these ranks; null: "no".
[[nodiscard]] std::string_view sharding_over(const Communicator* ranks);
/// The option that excludes cuda_graphs, and why; empty: none.
[[nodiscard]] std::string_view obstacle_to_graphs(Residency residency);

/// Rows of a table that each rank holds; the last shard may end with unused ones.
[[nodiscard]] inline int64_t shard_rows(int64_t rows, int64_t ranks) { return (rows + ranks - 1) / ranks; }
/// This rank's rows of a tensor; unused ones are 0.
[[nodiscard]] at::Tensor shard_of(const at::Tensor& whole, const Communicator& ranks);
/// All shards, one below the other: an exchange.
[[nodiscard]] at::Tensor gathered(const at::Tensor& shard, Communicator& ranks);

class BaseStore {
 public:
  /// @param blocks  with their pieces if they are in host memory or sharded.  @param ranks  hold the shards; null: not sharded.
  BaseStore(at::Device device, const std::vector<DecoderBlock::Weights>& blocks, std::shared_ptr<Communicator> ranks);

  [[nodiscard]] Residency residency() const {
    return ranks_ ? Residency::kSharded : stream_ ? Residency::kHost : Residency::kResident;
  }
  [[nodiscard]] const std::shared_ptr<Communicator>& ranks() const { return ranks_; }
  [[nodiscard]] const std::shared_ptr<WeightStream>& stream() const { return stream_; }

  /// Of a table's rows, those of a shard.
  [[nodiscard]] int64_t own_rows(int64_t rows) const { return ranks_ ? shard_rows(rows, ranks_->size()) : rows; }
  /// (rows, D) of a table or of its shards, which are gathered.
  [[nodiscard]] at::Tensor whole(const at::Tensor& table, int64_t rows) const;
  /// This rank's shard of a table, or all of it.
  [[nodiscard]] at::Tensor own(const at::Tensor& table) const { return ranks_ ? shard_of(table, *ranks_) : table; }

  /// A block's projections, on the device or in host memory; of shards: gathered, until another block's are asked for.
  [[nodiscard]] const BlockWeights& at(const DecoderBlock& block) const {
    return ranks_ ? stream_->at(block.index(), /*training=*/false) : block.weights().projections;
  }
  void replace(DecoderBlock& block, Projection projection, FrozenWeight weight) const;
  /// Between the device and host memory. A failure leaves all blocks where they are. @throws ValueError for `to_host` of shards.
  void move(std::vector<DecoderBlock>& blocks, bool to_host);
  /// Of projections on the device, and of the places that others pass through.
  [[nodiscard]] Bytes device_bytes(const std::vector<DecoderBlock>& blocks) const;

 private:
  /// Null if the blocks have no pieces.
  [[nodiscard]] std::shared_ptr<WeightStream> stream_of(const std::vector<DecoderBlock::Weights>& blocks) const;

  at::Device device_;
  std::shared_ptr<Communicator> ranks_;
  std::shared_ptr<WeightStream> stream_;
};

}  // namespace qlorapp
