// SPDX-License-Identifier: Apache-2.0
/// The frozen base of a model: embedding, blocks, last norm and head, where they are and how large.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "nn/base_store.hpp"
#include "nn/block/decoder_block.hpp"
#include "nn/step_context.hpp"
#include "ops/logit_rule.hpp"
#include "ops/memory_tape.hpp"
#include "qlorapp/core/units.hpp"
#include "qlorapp/dist/communicator.hpp"
#include "qlorapp/format/model_layout.hpp"

namespace qlorapp {

struct DecoderWeights {
  /// Where an embedding, head or norm is.
  [[nodiscard]] at::Tensor& dense(const format::Parameter& parameter);
  [[nodiscard]] const at::Tensor& dense(const format::Parameter& parameter) const {
    return const_cast<DecoderWeights&>(*this).dense(parameter);  // which changes nothing
  }
  [[nodiscard]] const FrozenWeight& linear(const format::Parameter& parameter) const {
    return blocks[static_cast<size_t>(parameter.layer)].projections[parameter.slot];
  }

  at::Tensor embed_tokens;  ///< (V, D), compute dtype.
  at::Tensor norm;          ///< (D), compute dtype.
  at::Tensor lm_head;       ///< (V, D); the same tensor as embed_tokens when the config ties them.
  std::vector<DecoderBlock::Weights> blocks;
  std::shared_ptr<Communicator> ranks = {};  ///< Hold a shard each (Residency::kSharded); null: this process has all.
};

class Decoder {
 public:
  /// @throws ValueError if a weight contradicts the config.
  Decoder(format::ModelConfig config, DecoderWeights weights);

  [[nodiscard]] const format::ModelConfig& config() const { return config_; }
  [[nodiscard]] std::vector<DecoderBlock>& blocks() { return blocks_; }
  [[nodiscard]] const std::vector<DecoderBlock>& blocks() const { return blocks_; }
  /// (V, D). Of shards: gathered.
  [[nodiscard]] at::Tensor embed_tokens() const { return store_.whole(embed_tokens_, config_.vocab_size); }
  [[nodiscard]] const at::Tensor& norm_weight() const { return norm_; }
  [[nodiscard]] at::Tensor lm_head() const { return store_.whole(lm_head_, config_.vocab_size); }
  /// What the head reads, and the norm's statistic: (y, rstd) of x (M, D).
  [[nodiscard]] std::tuple<at::Tensor, at::Tensor> last_norm(const at::Tensor& x) const;
  /// Of a token's embedding, as the dtype has it.
  [[nodiscard]] double embedding_factor() const { return embedding_factor_; }
  [[nodiscard]] ops::LogitRule logit_rule() const { return {1 / config_.logits_scaling, config_.final_logit_softcapping}; }
  /// The tables, or this rank's shards of them: no exchange.
  [[nodiscard]] const at::Tensor& own_embed_tokens() const { return embed_tokens_; }
  [[nodiscard]] const at::Tensor& own_lm_head() const { return lm_head_; }
  [[nodiscard]] bool embedding_on_host() const { return embed_tokens_.device() != device(); }
  /// Grown to the longest row seen so far.
  [[nodiscard]] RopeTables& rope() { return rope_; }

  /// Of the computation. The embedding and the blocks' projections may wait in host memory.
  [[nodiscard]] at::Device device() const { return norm_.device(); }
  /// Of activations, norms, embedding and head.
  [[nodiscard]] at::ScalarType dtype() const { return norm_.scalar_type(); }
  [[nodiscard]] bool on_gpu() const { return ops::computes_on_gpu(norm_); }

  /// Elements; tied weights count once.
  [[nodiscard]] int64_t parameter_count() const;
  /// On the device. What waits in host memory is not counted; the two places that its blocks pass through are.
  [[nodiscard]] Bytes weight_bytes() const;
  /// The list of what it consists of, for its vocabulary and tables as they are now.
  [[nodiscard]] std::vector<format::Parameter> parameters() const { return format::parameters(config_); }
  [[nodiscard]] std::vector<format::Parameter> linear_layers() const { return format::parameters(config_, format::Role::kLinear); }
  /// The value of a norm; of a table, this rank's shard (own_embed_tokens()). No exchange.
  [[nodiscard]] const at::Tensor& own_dense(const format::Parameter& parameter) const;
  /// The same; a table of shards: gathered.
  [[nodiscard]] at::Tensor dense(const format::Parameter& parameter) const {
    return store_.whole(own_dense(parameter), parameter.shape.front());
  }
  /// The weight of a linear layer where this process has it. Of a sharded base: its shape alone.
  [[nodiscard]] const FrozenWeight& own_linear(const format::Parameter& parameter) const {
    return blocks_[static_cast<size_t>(parameter.layer)].weights().projections[parameter.slot];
  }
  /// The same, as projections().
  [[nodiscard]] const FrozenWeight& linear(const format::Parameter& parameter) const {
    return projections(parameter.layer)[parameter.slot];
  }

  /// Other tables of the same dtype and width, (V', D); the vocabulary becomes theirs. Give one tensor twice for a tied table.
  /// @throws ValueError if they are sharded.
  void replace_tables(at::Tensor embed_tokens, at::Tensor lm_head);
  /// Moves the table between a GPU and pinned host memory; a tied table and a model on a CPU stay as they are. The tensor that
  /// embed_tokens() returned before stays where it is, for as long as it is held.
  void move_embedding(bool to_host);
  /// BaseStore::move().
  void move_blocks(bool to_host) { store_.move(blocks_, to_host); }
  [[nodiscard]] Residency residency() const { return store_.residency(); }
  /// Each read of projections or tables is an exchange: all ranks make it, in the same order.
  [[nodiscard]] bool is_sharded() const { return residency() == Residency::kSharded; }
  /// That hold the shards; null: not sharded.
  [[nodiscard]] const std::shared_ptr<Communicator>& ranks() const { return store_.ranks(); }
  /// Brings the projections of blocks that are not resident; null if they are.
  [[nodiscard]] const std::shared_ptr<WeightStream>& weight_stream() const { return store_.stream(); }

  /// BaseStore::at().
  [[nodiscard]] const BlockWeights& projections(int64_t block) const { return store_.at(blocks_[static_cast<size_t>(block)]); }
  /// DecoderBlock::replace_projection(), wherever the base is.
  void replace_projection(int64_t block, Projection projection, FrozenWeight weight) {
    store_.replace(blocks_[static_cast<size_t>(block)], projection, std::move(weight));
  }

 private:
  format::ModelConfig config_;
  at::Tensor embed_tokens_, norm_, lm_head_;  ///< Tables, or this rank's shards of them.
  std::vector<DecoderBlock> blocks_;
  double embedding_factor_ = 1;
  double stream_scale_ = 1;  ///< The residual stream is stored times this power of two (format::Family::float16_stream_scale).
  RopeTables rope_;
  BaseStore store_;
};

}  // namespace qlorapp
