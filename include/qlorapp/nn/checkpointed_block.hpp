// SPDX-License-Identifier: Apache-2.0
/// Keeps a block's inputs instead of everything inside it, and runs the block again in backward.
///
///     const at::Tensor y = checkpoint(block, x);     // a lambda, a shared_ptr, a ModuleHolder or a value
///     CheckpointedBlock checked(block);              // the same, to be called many times
///
/// LibTorch has no activation checkpointing (pytorch#52744). The recompute sees the random state and the autocast mode of the
/// first run, so dropout and mixed precision give the same values. Gradients are bit-equal to those of the block itself if its
/// kernels are deterministic. They reach every tensor that the block uses, inputs and captured ones alike, each through the
/// graph that it belongs to: hooks run once, torch::autograd::grad works, blocks nest.
///
/// The graph shares ownership of the block, so a temporary may be checkpointed. Without a gradient to compute (NoGradGuard,
/// nothing trainable) the block simply runs. The first run builds the block's graph to see which tensors it uses, and drops it:
/// a step's peak stays that of its backward.
///
/// A block of LoraLinear layers can also keep their outputs, of rows × out_features elements each: its recompute then runs everything
/// but their products, which are most of a transformer block's time.
///
///     CheckpointedBlock checked(block, {.keep_linear_outputs = true});
///
/// Rule: a block computes the same function twice and does not change its inputs; its side effects happen twice. Backward
/// through backward (create_graph) is refused.
/// Source: Chen et al. 2016, arXiv:1604.06174; semantics of torch.utils.checkpoint (non-reentrant) in torch 2.11.
#pragma once

#include <array>
#include <concepts>
#include <functional>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "qlorapp/core/error.hpp"

namespace qlorapp {

struct CheckpointOptions {
  bool keep_linear_outputs = false;  ///< Keeps the outputs of LoraLinear and LoraLinearModule inside the block. Changes no bit.
};

/// The untyped engine below checkpoint() and CheckpointedBlock. Does not synchronize.
/// @param run     computes outputs from inputs; called once now and once in each backward, maybe on a thread of autograd.
/// @param inputs  tensors (undefined ones allowed), saved for backward. Tensors that `run` captures are kept as they are.
/// @throws ValueError if `run` changed an input in place. In backward: Error if the recompute uses other tensors or returns other
///         shapes than the first run, if create_graph is set, or if the graph has been freed.
[[nodiscard]] std::vector<at::Tensor> checkpoint_tensors(std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)> run,
                                                         const std::vector<at::Tensor>& inputs,
                                                         const CheckpointOptions& options = {});

namespace detail {

template <class T>
inline constexpr bool kIsTensor = std::convertible_to<const T&, at::Tensor>;

/// What a shared_ptr or a torch::nn::ModuleHolder holds; else the block itself.
template <class Block>
decltype(auto) block_of(Block& block) {
  if constexpr (requires { *block; }) {
    return *block;
  } else {
    return (block);
  }
}

template <class Block, class... Args>
decltype(auto) run_block(Block& block, const Args&... args) {
  auto& target = block_of(block);
  if constexpr (requires { target.forward(args...); }) {
    return target.forward(args...);
  } else {
    return target(args...);
  }
}

/// A Tensor, a std::vector of them, or a std::tuple, pair or array of them, as the list that the engine works on.
template <class Output>
std::vector<at::Tensor> to_tensors(Output&& output) {
  using Plain = std::remove_cvref_t<Output>;
  if constexpr (kIsTensor<Plain>) {
    return {at::Tensor(std::forward<Output>(output))};
  } else if constexpr (std::same_as<Plain, std::vector<at::Tensor>>) {
    return std::forward<Output>(output);
  } else {
    return std::apply([](const auto&... tensors) { return std::vector<at::Tensor>{tensors...}; }, output);
  }
}

template <class Output>
Output from_tensors(std::vector<at::Tensor> tensors) {
  if constexpr (kIsTensor<Output>) {
    return std::move(tensors.front());
  } else if constexpr (std::same_as<Output, std::vector<at::Tensor>>) {
    return tensors;
  } else {
    return [&]<size_t... I>(std::index_sequence<I...>) { return Output{std::move(tensors[I])...}; }
    (std::make_index_sequence<std::tuple_size_v<Output>>{});
  }
}

/// How many of the first `end` arguments are tensors: the place of argument `end` in the list of inputs.
template <class... Args>
constexpr size_t tensors_before(size_t end) {
  constexpr std::array<bool, sizeof...(Args) + 1> kTensors{kIsTensor<Args>..., false};
  size_t count = 0;
  for (size_t i = 0; i < end; ++i) count += kTensors[i] ? 1 : 0;
  return count;
}

template <class Block, class... Args>
auto checkpoint_shared(std::shared_ptr<Block> block, const CheckpointOptions& options, const Args&... args) {
  using Output = std::remove_cvref_t<decltype(run_block(*block, args...))>;
  std::vector<at::Tensor> inputs;
  // Tensors are kept by the graph alone, which can free them; every other argument by the closure.
  const auto kept = [&inputs](const auto& argument) {
    using Argument = std::remove_cvref_t<decltype(argument)>;
    if constexpr (kIsTensor<Argument>) {
      inputs.push_back(argument);
      return nullptr;
    } else {
      return argument;
    }
  };
  auto run = [block = std::move(block),
              others = std::tuple<decltype(kept(args))...>{kept(args)...}](const std::vector<at::Tensor>& tensors) {
    const auto argument = [&]<size_t I>(std::integral_constant<size_t, I>) -> decltype(auto) {
      if constexpr (kIsTensor<std::tuple_element_t<I, std::tuple<Args...>>>) {
        return (tensors[tensors_before<Args...>(I)]);
      } else {
        return (std::get<I>(others));
      }
    };
    return [&]<size_t... I>(std::index_sequence<I...>) {
      return to_tensors(run_block(*block, argument(std::integral_constant<size_t, I>{})...));
    }
    (std::index_sequence_for<Args...>{});
  };
  return from_tensors<Output>(checkpoint_tensors(std::move(run), inputs, options));
}

}  // namespace detail

/// A block that is checkpointed whenever it is called. Copies share the block.
/// @tparam Block  a value, a shared_ptr or a torch::nn::ModuleHolder of something with forward(…), or a callable. It returns a
///                Tensor, or a std::vector, tuple, pair or array of them.
template <class Block>
class CheckpointedBlock {
 public:
  /// @throws ValueError if `block` is an empty pointer or holder.
  explicit CheckpointedBlock(Block block, const CheckpointOptions& options = {})
      : block_(std::make_shared<Block>(std::move(block))), options_(options) {
    if constexpr (std::is_constructible_v<bool, Block&>) {
      if (!*block_) throw ValueError("[checkpoint] the block must exist; got an empty pointer.");
    }
  }

  /// @param args  as the block's forward accepts them: tensors, which the graph saves, and others, which are copied.
  /// @returns what the block returns. Does not synchronize.
  template <class... Args>
  [[nodiscard]] auto forward(const Args&... args) const {
    return detail::checkpoint_shared(block_, options_, args...);
  }

  [[nodiscard]] auto parameters() const requires requires(Block& block) { detail::block_of(block).parameters(); }
  { return detail::block_of(*block_).parameters(); }

  [[nodiscard]] Block& block() const { return *block_; }

 private:
  std::shared_ptr<Block> block_;  // the graph holds it, too
  CheckpointOptions options_;
};

/// Runs `block` on `args` once, checkpointed: torch.utils.checkpoint.checkpoint(block, *args).
/// The block is copied: a holder or shared_ptr shares its module, a value its tensors.
template <class Block, class... Args>
[[nodiscard]] auto checkpoint(Block block, const Args&... args) {
  return CheckpointedBlock<Block>(std::move(block)).forward(args...);
}

}  // namespace qlorapp
