// SPDX-License-Identifier: Apache-2.0
/// Options that save a training step's memory and cost time, beside the choice of kept activations (keep.hpp). Losses stay equal.
/// Gradients differ at most by the order in which they are added up.
#pragma once

#include <cstdint>
#include <string_view>

namespace qlorapp {

/// How many dequantized weights a GPU holds at a time. N output, K input features of the projections that are multiplied as
/// one; a workspace is about 2·N·K bytes in 16 bits. A CPU dequantizes a panel at a time whatever this says.
enum class WeightWorkspace : uint8_t {
  kLayer,  ///< A recompute leaves its workspaces to the backward pass after it: a layer's, and each weight is dequantized least
           ///< often.
  kStack,  ///< One stack at a time (q|k|v, o, gate|up or down): again for backward, and again for each tile of the MLP.
  kProjection,  ///< One weight at a time, and its adapter by products of its own: the largest workspace is that of one
                ///< projection.
};

/// As the option weight_workspace spells it.
[[nodiscard]] std::string_view to_string(WeightWorkspace workspace);
/// @throws ValueError naming the nearest of layer, stack, projection.
[[nodiscard]] WeightWorkspace parse_weight_workspace(std::string_view text);

struct MemorySettings {
  /// Rows of logits that exist at a time: rows × vocabulary in the compute dtype. 0: as loss_chunk_rows_on() says.
  int64_t loss_chunk_rows = 0;
  /// loss_chunk_rows, or if it is 0 the device's own: 512 on a CPU, which gains nothing above; on a GPU 2048, whose products have a better
  /// shape than those of fewer rows, and half of that for each doubling of a vocabulary beyond 150,000, as the logits would outgrow the rest.
  [[nodiscard]] int64_t loss_chunk_rows_on(bool gpu, int64_t vocabulary) const;
  /// Rows that go through norm, gate, up, SwiGLU and down at a time, forward, recomputed and backward: the (M, 2·I) and (M, I)
  /// tensors never exist whole. 0: all rows at once. A multiple of kTileStep. Blocks that keep everything keep gate|up whole
  /// and are not tiled.
  int64_t mlp_tile_rows = 0;
  WeightWorkspace weight_workspace = WeightWorkspace::kLayer;
  /// The embedding table waits in pinned host memory and a GPU reads the batch's rows from there. Nothing where the head is
  /// tied to it (the head is a product on the GPU) and on a CPU.
  bool embedding_on_host = false;
  /// The frozen projections of all blocks wait in pinned host memory. A GPU has two blocks of them at a time, the one it computes with and
  /// the next, which is copied meanwhile. A step takes at least the time of those copies. Nothing on a CPU.
  bool base_on_host = false;

  /// A dropout mask's generator makes four numbers a call, so tiles begin at multiples of four elements.
  static constexpr int64_t kTileStep = 4;

  /// @throws ValueError naming the member that is out of range.
  void validate() const;
  friend bool operator==(const MemorySettings&, const MemorySettings&) = default;
};

}  // namespace qlorapp
