// SPDX-License-Identifier: Apache-2.0
/// A part of a block: what stands between a norm and the residual stream. Attention and the gated MLP are parts; a mixture of experts, a
/// gated delta net or a short convolution would be others.
///
///     y = part(n)        forward
///     dn from dy         backward(), which needs no n
///     dA, dB from n      add_input_gradients(): the layers that read n, after the norm's backward pass has formed n again
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "nn/block/block_data.hpp"
#include "nn/block/projection_group.hpp"
#include "nn/saved.hpp"
#include "nn/step_context.hpp"

namespace qlorapp {

/// Keys and values of the positions that were already seen, for generation: (slots, H_kv, d), each row in slots of its own.
struct KeyValueCache {
  at::Tensor keys, values;
};

/// Where the rows of one step lie in a cache. Entries are those of StepContext::row_starts, row by row.
struct CacheRows {
  std::vector<int64_t> starts = {};   ///< Position p of the row is in slot starts + p, unless rows share it.
  std::vector<int64_t> lengths = {};  ///< Positions of the row, those of this step included.
  std::vector<int64_t> shared_starts = {}, shared_lengths = {};  ///< As GenerationCache has them, of these rows.
  at::Tensor slots = {};                                         ///< (M) int64, on the device: where each token of this step goes.
  /// Those four on the device, (4, R) int64, where each row has one token and the device reads them there (ops::decode_attention); else undefined.
  at::Tensor on_device = {};
  int64_t capacity = 0;  ///< No length is above it.
  /// The rows begin here: their keys are those of this step.
  bool all_new = false;
};

/// Both, for one block. The step's positions follow those in the cache, and are appended to it.
struct BlockCache {
  const CacheRows& rows;
  KeyValueCache& entries;
};

/// Purpose of a forward pass.
enum class Pass : uint8_t {
  kForward,    ///< Nothing is kept for backward, but what is cheap to name and may be asked for (Keep::kAttentionOnly).
  kKeep,       ///< Everything that backward needs is kept.
  kRecompute,  ///< Fills what backward needs and lacks. Stops there, unless the output is needed, too.
};

/// Workspaces of each group that a recompute has filled and the backward pass after it reads, or that tiles share; undefined where there are none.
using Workspaces = std::array<at::Tensor, format::kGroups>;

class BlockPart {
 public:
  /// @param data  kept by reference.  @param groups  of its linear layers: those that read n first.
  BlockPart(const BlockData& data, std::initializer_list<format::Group> groups) {
    for (const format::Group group : groups) groups_.emplace_back(data, group);
  }
  virtual ~BlockPart() = default;
  BlockPart(const BlockPart&) = delete;
  BlockPart& operator=(const BlockPart&) = delete;

  struct Call {
    const StepContext& context;
    PartSaved& saved;
    Pass pass = Pass::kForward;
    Workspaces* workspaces = nullptr;  ///< Null: none is shared.
    const BlockCache* cache = nullptr;
    bool needs_output = true;  ///< Of a recompute.
  };
  /// @param n     (M, D) with input_spare() columns behind it or none. By value: freed as soon as it was read.
  /// @param into  takes y; undefined: y is a tensor of its own.
  /// @returns y (M, D); undefined if a recompute stopped before it.
  [[nodiscard]] virtual at::Tensor forward(Wide n, const Call& call, at::Tensor into = {}) const = 0;

  /// Gradients that add_input_gradients() still needs.
  struct Pending {
    Wide dy;
    ProjectionGroup::Inner v;
  };
  struct BackwardCall {
    const StepContext& context;
    PartSaved& saved;  ///< Consumed, except u.
    std::span<const LoraGradients> gradients;
    Workspaces& workspaces;
    bool keep_workspaces = false;  ///< Other rows of the same part follow.
    bool prefetch = false;         ///< Begin to load the next block's input when the widest tensors are freed.
    bool need_dn = true;           ///< False: dn is not filled.
  };
  /// @param dy  (M, D) with output_spare() columns.  @param[out] dn  (M, D), allocated always.
  [[nodiscard]] virtual Pending backward(const Wide& dy, at::Tensor& dn, const BackwardCall& call) const = 0;
  void add_input_gradients(const Pending& pending, const at::Tensor& n, const StepContext& context, const PartSaved& saved,
                           std::span<const LoraGradients> gradients) const {
    input().add_gradients(pending.dy, n, pending.v, context, of(input(), saved), gradients);
  }

  /// Makes room for what it keeps.
  void prepare(PartSaved& saved) const {
    saved.tensors.resize(kept());
    saved.u.resize(linears());
  }
  /// Whether forward may run over some rows after others.
  [[nodiscard]] virtual bool is_tokenwise() const = 0;
  [[nodiscard]] int64_t input_spare(const StepContext& context) const { return input().spare(context); }
  [[nodiscard]] int64_t output_spare(const StepContext& context) const { return output().spare(context); }

 protected:
  [[nodiscard]] virtual size_t kept() const = 0;  ///< Size of PartSaved::tensors.
  [[nodiscard]] const ProjectionGroup& input() const { return groups_.front(); }
  [[nodiscard]] const ProjectionGroup& output() const { return groups_.back(); }
  /// The group's layers among the part's.
  [[nodiscard]] std::span<at::Tensor> of(const ProjectionGroup& group, PartSaved& saved) const {
    return std::span(saved.u).subspan(group.begin() - input().begin(), group.size());
  }
  [[nodiscard]] std::span<const at::Tensor> of(const ProjectionGroup& group, const PartSaved& saved) const {
    return std::span(saved.u).subspan(group.begin() - input().begin(), group.size());
  }

 private:
  [[nodiscard]] size_t linears() const { return output().begin() + output().size() - input().begin(); }

  std::vector<ProjectionGroup> groups_;
};

/// An uninitialized matrix in rows with room for the low-rank products behind them.
[[nodiscard]] inline Wide wide(int64_t tokens, int64_t width, int64_t spare, const at::TensorOptions& options) {
  return {at::empty({tokens, width + spare}, options), width};
}

}  // namespace qlorapp
