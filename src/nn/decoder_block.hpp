// SPDX-License-Identifier: Apache-2.0
/// One block of a Llama-shaped decoder, forward and backward written out over registered operators.
///
///     n1 = norm(x)      q, k, v = n1·Wᵀ (+ LoRA), RoPE on q and k      a = attention(q, k, v)
///     x2 = x + a·W_oᵀ (+ LoRA)                                         n2 = norm(x2)
///     y  = x2 + (silu(n2·W_gateᵀ) ∘ n2·W_upᵀ)·W_downᵀ (+ LoRA)
///
/// The base is frozen, so backward forms gradients of activations and of the adapters only; no autograd graph exists. Norm
/// outputs and the SwiGLU product are never kept: the pass that takes their gradient back forms them again. A recompute stops
/// before down_proj, whose output backward does not need. Knows no batch: rows and positions come with the StepContext.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

#include "adapters/lora_projection.hpp"
#include "adapters/projection.hpp"
#include "nn/block_weights.hpp"
#include "nn/float8_stack.hpp"
#include "nn/projection_stack.hpp"
#include "nn/saved.hpp"
#include "nn/step_context.hpp"
#include "qlorapp/core/units.hpp"
#include "qlorapp/nn/keep.hpp"

namespace qlorapp {

/// Keys and values of the positions that were already seen, for generation: (slots, H_kv, d), each row in slots of its own.
struct KeyValueCache {
  at::Tensor keys, values;
};

/// Where the rows of one step lie in a cache. Entries are those of StepContext::row_starts, row by row.
struct CacheRows {
  std::vector<int64_t> starts;   ///< The row's first slot.
  std::vector<int64_t> lengths;  ///< Positions of the row, those of this step included.
  at::Tensor slots;              ///< (M) int64, on the device: where each token of this step goes.
};

class DecoderBlock {
 public:
  struct Shape {
    int64_t hidden = 0;        ///< D
    int64_t intermediate = 0;  ///< I
    int64_t heads = 0;         ///< H
    int64_t kv_heads = 0;      ///< H_kv, divides H
    int64_t head_dim = 0;      ///< d, even
    double rms_norm_eps = 1e-6;

    [[nodiscard]] int64_t attention_width() const { return heads * head_dim; }
    [[nodiscard]] int64_t qkv_width() const { return (heads + 2 * kv_heads) * head_dim; }
  };
  /// Of each linear layer.
  using Adapters = std::vector<std::optional<LoraAdapter>>;
  using Gradients = std::vector<LoraGradients>;

  /// By the slots of format::parameters().
  struct Weights {
    std::vector<at::Tensor> norms;  ///< (D) each, compute dtype.
    BlockWeights projections;
    at::Tensor on_host = {};  ///< uint8: the piece of host memory that the projections are views of, if they wait there.
    /// uint8: this rank's part of the piece, if ranks hold parts; then the projections have shapes alone.
    at::Tensor part = {};
  };

  /// @param weights  of the shapes of format::parameters().  @param index  of the block in its model; part of the dropout key.
  DecoderBlock(const Shape& shape, Weights weights, int64_t index);

  Adapters& adapters() { return adapters_; }
  [[nodiscard]] const Adapters& adapters() const { return adapters_; }
  [[nodiscard]] const Shape& shape() const { return shape_; }
  [[nodiscard]] const Weights& weights() const { return weights_; }
  /// Replaces a projection's weight, of the same shape, after PiSSA, OLoRA or LoftQ changed it. For a sharded base call
  /// Decoder::replace_projection.
  void replace_projection(Projection projection, FrozenWeight weight);
  /// The weights with copies of the projections in one piece of host memory, or on the device of the norms, each in memory of its own. A
  /// block whose projections are on the host of a GPU computes with StepContext::weights.
  [[nodiscard]] Weights moved(bool to_host) const;
  void replace_weights(Weights weights) noexcept { weights_ = std::move(weights); }
  /// Makes the block ready for StepContext::float8.
  /// @param ones  float32 on the weights' device, as long as the longest side of any stack, all 1; undefined: in 16 bits again.
  /// @param projections  its weights (Decoder::projections).
  /// @throws ValueError naming the block if its weights do not allow it; then nothing has changed but that it is off.
  void set_float8(const at::Tensor& ones, const BlockWeights& projections);
  [[nodiscard]] bool in_float8() const { return float8_.front().weight.defined(); }
  /// The `ones` of the last set_float8().
  [[nodiscard]] const at::Tensor& float8_ones() const { return float8_.front().ones; }
  /// Whether projections that share an input are multiplied as one in this context.
  [[nodiscard]] bool stacked(const StepContext& context) const;
  [[nodiscard]] int64_t index() const { return index_; }

  /// @param x  (M, D), compute dtype.  @param saved  receives what `keep` names; null when no backward will follow.
  /// @returns (M, D). Does not synchronize.
  [[nodiscard]] at::Tensor forward(const at::Tensor& x, const StepContext& context, Saved* saved, Keep keep) const;

  /// @param dy     (M, D), gradient of the output. By value: overwritten if this is its only owner and it has enough spare columns,
  ///               else copied.
  /// @param saved  the result of forward. By value: tensors are freed as they are used, or overwritten by their last owner.
  /// @param gradients  the adapters' gradients are added here.
  /// @param need_dx    false for the first block: nothing below it is trained.
  /// @returns (M, D) gradient of x, undefined unless need_dx; with columns behind it that the block below can use.
  [[nodiscard]] Wide backward(Wide dy, const StepContext& context, Saved saved, const Gradients& gradients, bool need_dx) const;

  /// The forward pass for the positions that follow those in the cache; appends to it. No backward follows.
  [[nodiscard]] at::Tensor forward_cached(const at::Tensor& x, const StepContext& context, const CacheRows& rows,
                                          KeyValueCache& cache) const;

  /// Device bytes that forward keeps for `tokens` tokens, by formula: a plan can ask before anything exists. `stacked` as in
  /// StepContext. None with input_on_host, whose input is in host memory.
  [[nodiscard]] static Bytes kept_bytes(const Shape& shape, int64_t tokens, Keep keep, at::ScalarType dtype,
                                        std::span<const int64_t> ranks, bool stacked = false);
  [[nodiscard]] Bytes kept_bytes(int64_t tokens, Keep keep, at::ScalarType dtype, bool stacked = false) const;

 private:
  /// Projections that share an input.
  struct Group {
    size_t index;  ///< Of the group.
    size_t begin, count;
  };
  static constexpr size_t kInputNorm = 0, kPostAttentionNorm = 1;
  static constexpr Group kQkv{0, 0, 3}, kO{1, 3, 1}, kGateUp{2, 4, 2}, kDown{3, 6, 1};
  /// Workspaces that a recompute has filled and the backward pass after it reads, or that tiles share; undefined where there are none.
  struct Workspaces {
    at::Tensor qkv, o, gate_up, down;
  };

  /// Where this context computes: fetched from the host, or where they are.
  [[nodiscard]] const BlockWeights& projections(const StepContext& context) const;
  [[nodiscard]] ProjectionStack stack(const Group& group, const StepContext& context) const;
  [[nodiscard]] Float8Stack float8_stack(const Group& group, const StepContext& context) const;
  /// Columns that a matrix which these groups' products read or write carries behind its own. 0 unless stacked.
  [[nodiscard]] int64_t spare(const StepContext& context, std::initializer_list<Group> groups) const;
  /// s·dy·B of each projection of a group, in tensors of their own; undefined where they are in columns behind dy.
  using Inner = std::array<at::Tensor, 3>;
  /// y = x·Wᵀ with LoRA for a group, and u into `saved` unless it is null; the workspace is taken from `cache` if it is there, and put
  /// there if `cache` is not null.
  void project(const Group& group, at::Tensor y, const Wide& x, const StepContext& context, Saved* saved,
               at::Tensor* cache = nullptr) const;
  /// The half of backward that needs no input: dx (unless null) from dy. @param workspace  undefined: dequantized here.
  [[nodiscard]] Inner project_back(const Group& group, at::Tensor* dx, const Wide& dy, const StepContext& context,
                                   const at::Tensor& workspace) const;
  /// The other half, after it: the adapters' gradients. @param v  what project_back returned.
  void add_gradients(const Group& group, const Wide& dy, const at::Tensor& x, const Inner& v, const StepContext& context,
                     const Saved& saved, const Gradients& gradients) const;

  /// Whether the MLP of so many tokens goes through in tiles (MemorySettings), where gate|up is not kept.
  [[nodiscard]] static bool tiled(const StepContext& context, int64_t tokens);
  /// Whether a dequantized weight waits for its next use in the block.
  [[nodiscard]] static bool keeps_workspaces(const StepContext& context) {
    return context.memory.weight_workspace == WeightWorkspace::kLayer;
  }
  template <class Use>
  static void for_each_tile(const StepContext& context, int64_t tokens, Use&& use);

  [[nodiscard]] at::Device device() const { return weights_.norms.front().device(); }  ///< Of the computation.
  [[nodiscard]] const LoraAdapter* adapter(Projection projection) const;
  [[nodiscard]] std::optional<DropoutKey> dropout(Projection projection, const StepContext& context) const;
  [[nodiscard]] Wide backward_down(const Wide& dy, const StepContext& context, Saved& saved, const Gradients& gradients,
                                   at::Tensor* cache) const;
  [[nodiscard]] at::Tensor project_qkv(const Wide& n1, const StepContext& context, Saved* saved, at::Tensor* cache = nullptr) const;
  [[nodiscard]] at::Tensor attend(const StepContext& context, Saved& saved, bool for_backward, Workspaces* cache) const;
  void compute_gate_up(const Wide& n2, const StepContext& context, Saved& saved, bool for_backward, Workspaces* cache) const;
  void compute_until_gate_up(const StepContext& context, Saved& saved, bool for_backward, Workspaces* cache = nullptr) const;
  [[nodiscard]] Saved compute_tile(const at::Tensor& x2, const StepContext& context, bool for_backward, Workspaces* cache) const;
  [[nodiscard]] at::Tensor mlp_in_tiles(const at::Tensor& x2, const StepContext& context) const;
  void backward_mlp(const Wide& residual, const StepContext& context, Saved& saved, const Gradients& gradients,
                    Workspaces& workspaces, bool keep_workspaces) const;

  Shape shape_;
  Weights weights_;
  Adapters adapters_;
  std::array<Float8Scales, 4> float8_;  ///< Of each group; undefined while products are in 16 bits.
  int64_t index_;
};

}  // namespace qlorapp
