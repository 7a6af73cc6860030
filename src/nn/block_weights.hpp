// SPDX-License-Identifier: Apache-2.0
/// The frozen linear layers of a block in one piece of memory, so that one copy moves them, or one exchange gathers their shards.
///
///     bytes  [ q: packed absmax nested_absmax nested_offset | k: … | … | down: … ]      each tensor begins at a multiple of 256
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "qlorapp/adapters/lora_adapter.hpp"
#include "quant/arrival.hpp"

namespace qlorapp {

using BlockWeights = std::vector<FrozenWeight>;

/// Shape, dtype and four-bit options of a frozen weight: they determine the layout of its bytes.
struct WeightForm {
  std::vector<int64_t> shape;                    ///< (out, in).
  at::ScalarType dtype = at::ScalarType::Float;  ///< Of a dense weight, or of a four-bit one before it was quantized.
  std::optional<Quantizer::Options> four_bit = {};

  [[nodiscard]] static WeightForm of(const FrozenWeight& weight);
  /// Of a weight in ggml's blocks, which are not quantized from anything here.
  [[nodiscard]] static WeightForm of_blocks(std::vector<int64_t> shape, QuantType type) {
    return {std::move(shape), at::kBFloat16, Quantizer::Options{type, block_elements(type), false}};
  }
  friend bool operator==(const WeightForm&, const WeightForm&) = default;
};
using BlockForms = std::vector<WeightForm>;

[[nodiscard]] BlockForms forms_of(const BlockWeights& weights);
/// Memory for a weight of this form, not filled.
[[nodiscard]] FrozenWeight empty_weight(const WeightForm& form, const PlaceMaker& place);
/// Length of the piece.
[[nodiscard]] int64_t bytes_in_one_piece(const BlockForms& forms);
/// Weights whose tensors are views of the piece. @param bytes  uint8, at least bytes_in_one_piece() of them.
[[nodiscard]] BlockWeights views_of(const at::Tensor& bytes, const BlockForms& forms);
/// Length of each rank's shard of a piece: all the same, so the last may end with unused bytes.
[[nodiscard]] int64_t shard_bytes(const BlockForms& forms, int64_t ranks);
/// Weights that have shapes and dtypes alone: of a sharded block. @param device  of the computation; Meta in a plan.
[[nodiscard]] BlockWeights shapes_of(const BlockForms& forms, at::Device device);
/// Copies a weight of the same form into the tensors of another, which keep their places.
void copy_weight(const FrozenWeight& to, const FrozenWeight& from);

}  // namespace qlorapp
