// SPDX-License-Identifier: Apache-2.0
/// The output projection and its cross-entropy where the head itself is trained (modules_to_save): ops/cross_entropy.hpp's
/// formulas and rounding, with the gradient of the head beside.
///
///     grad_head += Σ_m ((softmax − onehot)·grad_scale)ᵀ·hidden[m]      float32
#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>

#include "ops/logit_rule.hpp"

namespace qlorapp {

struct HeadPass {
  at::Tensor loss;         ///< () float32, summed over the rows with a target.
  at::Tensor grad_hidden;  ///< (M, D), dtype of hidden.
};

/// A few hundred rows of logits exist at a time. Rows without a target are left out on a CPU and weighed by nothing on a GPU,
/// which is not waited for. Not differentiable.
/// @param hidden  (M, D).  @param head  (V, D), dtype of hidden.  @param targets  int64 (M), in [0, V) or negative.
/// @param grad_scale  () float32, or nothing for 1.  @param head_gradient  (V, D) float32; added to.
/// @param target_count  rows with a target, for a plan, whose targets have no values; -1: all.
/// @param statistics  as ops/cross_entropy.hpp's: added to.
[[nodiscard]] HeadPass trained_head_pass(const at::Tensor& hidden, const at::Tensor& head, const at::Tensor& targets,
                                         ops::LogitRule logits, const std::optional<at::Tensor>& grad_scale,
                                         const at::Tensor& head_gradient, int64_t target_count = -1,
                                         const std::optional<at::Tensor>& statistics = std::nullopt);

/// The summed loss on an autograd graph over hidden and `master`, the float32 (V, D) leaf of the head.
[[nodiscard]] at::Tensor trained_head_loss(const at::Tensor& hidden, const at::Tensor& master, const at::Tensor& targets,
                                           ops::LogitRule logits);

}  // namespace qlorapp
