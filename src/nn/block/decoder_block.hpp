// SPDX-License-Identifier: Apache-2.0
/// One block of a decoder: a residual stream around two parts, forward and backward written out over registered operators.
///
///     x2 = x  + norm(attention(norm(x)))         each norm where the family has one (format::Site)
///     y  = x2 + norm(mlp(norm(x2)))
///
/// The base is frozen, so backward forms gradients of activations and of the adapters only; no autograd graph exists. Outputs of the norms
/// before the parts are never kept: the pass that takes their gradient back forms them again. Knows no batch: rows and positions come with
/// the StepContext.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "adapters/projection.hpp"
#include "nn/block/attention_part.hpp"
#include "nn/block/block_data.hpp"
#include "nn/block/block_part.hpp"
#include "nn/block/block_shape.hpp"
#include "nn/saved.hpp"
#include "nn/step_context.hpp"
#include "qlorapp/core/units.hpp"
#include "qlorapp/nn/keep.hpp"

namespace qlorapp {

class DecoderBlock {
 public:
  using Shape = BlockShape;
  using Weights = BlockTensors;
  /// Of each linear layer.
  using Adapters = std::vector<std::optional<LoraAdapter>>;
  using Gradients = std::vector<LoraGradients>;

  /// @param weights  of the shapes of format::parameters().  @param index  of the block in its model; part of the dropout key.
  DecoderBlock(const Shape& shape, Weights weights, int64_t index);

  Adapters& adapters() { return data_->adapters; }
  [[nodiscard]] const Adapters& adapters() const { return data_->adapters; }
  [[nodiscard]] const Shape& shape() const { return data_->shape; }
  [[nodiscard]] const Weights& weights() const { return data_->weights; }
  [[nodiscard]] int64_t index() const { return data_->index; }
  [[nodiscard]] const BlockData& data() const { return *data_; }
  /// Replaces a projection's weight, of the same shape, after PiSSA, OLoRA or LoftQ changed it. For a sharded base call
  /// Decoder::replace_projection.
  void replace_projection(Projection projection, FrozenWeight weight);
  /// The weights with copies of the projections in one piece of host memory, or on the device of the norms, each in memory of its own. A
  /// block whose projections are on the host of a GPU computes with StepContext::weights.
  [[nodiscard]] Weights moved(bool to_host) const;
  void replace_weights(Weights weights) noexcept { data_->weights = std::move(weights); }
  /// Makes the block ready for StepContext::float8.
  /// @param ones  float32 on the weights' device, as long as the longest side of any stack, all 1; undefined: in 16 bits again.
  /// @param projections  its weights (Decoder::projections).
  /// @throws ValueError naming the block if its weights do not allow it; then nothing has changed but that it is off.
  void set_float8(const at::Tensor& ones, const BlockWeights& projections);
  [[nodiscard]] bool in_float8() const { return data_->float8.front().weight.defined(); }
  /// The `ones` of the last set_float8().
  [[nodiscard]] const at::Tensor& float8_ones() const { return data_->float8.front().ones; }
  /// Whether projections that share an input are multiplied as one in this context.
  [[nodiscard]] bool stacked(const StepContext& context) const { return data_->stacked(context); }

  /// @param x  (M, D), compute dtype.  @param saved  receives what `keep` names; null when no backward will follow.
  /// @param cache  of generation: the positions follow those in it, and are appended. No backward follows.
  /// @returns (M, D). Does not synchronize.
  [[nodiscard]] at::Tensor forward(const at::Tensor& x, const StepContext& context, Saved* saved, Keep keep,
                                   const BlockCache* cache = nullptr) const;

  /// @param dy     (M, D), gradient of the output. By value: overwritten if this is its only owner and it has enough spare columns,
  ///               else copied.
  /// @param saved  the result of forward. By value: tensors are freed as they are used, or overwritten by their last owner.
  /// @param gradients  the adapters' gradients are added here.
  /// @param need_dx    false for the first block: nothing below it is trained.
  /// @returns (M, D) gradient of x, undefined unless need_dx; with columns behind it that the block below can use.
  [[nodiscard]] Wide backward(Wide dy, const StepContext& context, Saved saved, const Gradients& gradients, bool need_dx) const;

  /// Device bytes that forward keeps for `tokens` tokens: what a forward pass on Meta keeps, so that a plan can ask before anything exists.
  /// @param stacked  as in StepContext.  @returns none with input_on_host, whose input is in host memory.
  [[nodiscard]] Bytes kept_bytes(int64_t tokens, Keep keep, at::ScalarType dtype, bool stacked = false) const;
  /// Of the config's first block, without adapters.
  [[nodiscard]] static Bytes kept_bytes(const format::ModelConfig& config, int64_t tokens, Keep keep, at::ScalarType dtype,
                                        bool stacked = false);

 private:
  /// One of the two parts, and the norms around it.
  struct Branch {
    const BlockPart& part;
    format::Site before, after;
  };
  [[nodiscard]] Branch attention() const;
  [[nodiscard]] Branch mlp() const;

  [[nodiscard]] double stream_eps() const;
  [[nodiscard]] Saved empty_saved() const;
  /// The part's input. @param residual  undefined, or added to x first; then x becomes the sum.
  [[nodiscard]] Wide normed(const Branch& branch, at::Tensor& x, const at::Tensor& residual, const StepContext& context,
                            PartSaved& saved) const;
  /// What the branch adds to the stream, not added yet.
  [[nodiscard]] at::Tensor through(const Branch& branch, Wide n, const BlockPart::Call& call, at::Tensor into = {}) const;
  /// From the gradient of the branch's output to that of its input x, both in `residual`.
  void back_through(const Branch& branch, const Wide& residual, const at::Tensor& x, const BlockPart::BackwardCall& call) const;
  /// y = x2 + mlp(x2), nothing kept, some rows after others.
  [[nodiscard]] at::Tensor mlp_in_tiles(const at::Tensor& x2, const StepContext& context) const;
  template <class Use>
  static void for_each_tile(const StepContext& context, int64_t tokens, Use&& use);
  [[nodiscard]] bool tiled(const StepContext& context, int64_t tokens) const;

  std::unique_ptr<BlockData> data_;  ///< The parts refer to it.
  std::unique_ptr<AttentionPart> attention_;
  std::unique_ptr<BlockPart> mlp_;
};

}  // namespace qlorapp
