// SPDX-License-Identifier: Apache-2.0
/// Keeps a block's inputs instead of everything inside it, and runs the block again in backward.
///
/// LibTorch has no activation checkpointing (pytorch#52744); this is it, for any block that can be called with tensors and can
/// name its parameters. The recompute sees the random state and autocast mode of the first run, so dropout and mixed precision
/// give the same values; gradients are bit-equal to those of the unchecked block wherever its kernels are deterministic.
/// Works when no input needs a gradient (the parameters are inputs of the graph node themselves), nested, and with several
/// outputs. Without a graph to build (no_grad, nothing trainable) it simply runs the block.
///
/// Rule: a block must compute the same function twice; side effects happen twice. Backward through backward
/// (create_graph) is refused.
/// Source: Chen et al. 2016, arXiv:1604.06174; semantics of torch.utils.checkpoint (non-reentrant) in torch 2.11.
#pragma once

#include <concepts>
#include <functional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace qlorapp {

/// The untyped engine below CheckpointedBlock.
/// @param run         computes outputs from inputs; called once now and once in backward.
/// @param inputs      tensors (undefined ones allowed), saved for backward.
/// @param parameters  what `run` uses beside its inputs and what may require grad.
[[nodiscard]] std::vector<at::Tensor> checkpoint(std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)> run,
                                                 const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& parameters);

namespace detail {

template <class Block>
decltype(auto) block_of(Block& block) {
  if constexpr (requires { *block; }) {
    return *block;  // a torch::nn::ModuleHolder, a shared_ptr
  } else {
    return (block);
  }
}

}  // namespace detail

/// @tparam Block  a value, a shared_ptr or a torch::nn::ModuleHolder of something with forward(Tensor…) → Tensor and
///                parameters() → std::vector<Tensor>.
template <class Block>
class CheckpointedBlock {
 public:
  explicit CheckpointedBlock(Block block) : block_(std::move(block)) {}

  /// @param inputs  as the block's forward takes them.  @returns what it returns. Does not synchronize.
  /// The block must live until backward has run.
  template <std::convertible_to<at::Tensor>... Tensors>
  [[nodiscard]] at::Tensor forward(const Tensors&... inputs) {
    const auto run = [this](const std::vector<at::Tensor>& tensors) {
      return call(tensors, std::index_sequence_for<Tensors...>{});
    };
    return checkpoint(run, {inputs...}, detail::block_of(block_).parameters()).front();
  }

  [[nodiscard]] std::vector<at::Tensor> parameters() { return detail::block_of(block_).parameters(); }
  Block& block() { return block_; }

 private:
  template <size_t... I>
  std::vector<at::Tensor> call(const std::vector<at::Tensor>& tensors, std::index_sequence<I...>) {
    return {detail::block_of(block_).forward(tensors[I]...)};
  }

  Block block_;
};

}  // namespace qlorapp
