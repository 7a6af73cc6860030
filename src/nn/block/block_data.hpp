// SPDX-License-Identifier: Apache-2.0
/// The tensors of one block, which its parts share.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "adapters/lora_projection.hpp"
#include "nn/block/block_shape.hpp"
#include "nn/block_weights.hpp"
#include "nn/float8_stack.hpp"
#include "nn/step_context.hpp"

namespace qlorapp {

/// Frozen weights by the slots of format::parameters().
struct BlockTensors {
  std::vector<at::Tensor> dense;  ///< Norms, then biases; compute dtype.
  BlockWeights projections;
  /// uint8: the piece of host memory that the projections are views of, or this rank's shard of it; then they have shapes alone.
  /// Undefined if they are resident (base_store.hpp).
  at::Tensor piece = {};
};

struct BlockData {
  BlockShape shape;
  BlockTensors weights;
  std::vector<std::optional<LoraAdapter>> adapters;  ///< Of each linear layer.
  std::array<at::Tensor, format::kGroups> biases;    ///< Of each group as one; undefined where it has none.
  std::array<Float8Scales, format::kGroups> float8;  ///< Of each group; undefined while products are in 16 bits.
  std::array<at::Tensor, 2> added_norms;             ///< Behind attention and MLP, times BlockShape::stream_scale if it is not 1.
  int64_t index = 0;                                 ///< Of the block in its model; part of the dropout key.

  BlockData(BlockShape block_shape, BlockTensors tensors, int64_t block_index);
  [[nodiscard]] at::Device device() const { return weights.dense.front().device(); }  ///< Of the computation.
  /// Where this context computes: fetched from the host, or where they are.
  [[nodiscard]] const BlockWeights& projections(const StepContext& context) const;
  /// Whether projections that share an input are multiplied as one in this context.
  [[nodiscard]] bool stacked(const StepContext& context) const;
  /// The weight of the norm at this site; undefined where there is none. Behind a part it has the scale of the stream in it.
  [[nodiscard]] at::Tensor norm(format::Site site) const;
  /// By which the norms behind the parts compute.
  [[nodiscard]] format::NormRule added_rule() const;
};

}  // namespace qlorapp
