// SPDX-License-Identifier: Apache-2.0
/// The output projection and its cross-entropy in one, a chunk of rows at a time: the logits never exist as a whole.
///
///     loss_sum = Σ_{m: targets[m] >= 0} −log softmax(logit(round(hidden[m]·weightᵀ)))[targets[m]]
///     grad_hidden[m] = round((softmax − onehot)·grad_scale)·weight      (0 where ignored)
///
/// hidden (M, D) and the frozen weight (V, D) share one dtype; targets int64 (M), already shifted, negative to ignore a row.
/// Logits are rounded to that dtype and widened to float32 for softmax and loss, as transformers does; loss_sum is float32 ()
/// (float64 for float64), added up in double. Ignored rows are left out before anything is computed and cost nothing.
/// Memory beyond the results: chunk_rows × V elements of hidden's dtype (plus V floats a thread on the CPU); where a CPU has no
/// 16-bit matrix instructions, also 4 MiB panels of the weight, chunk_rows × (D + panel) floats. Never a copy of the weight.
/// Source: Hsu et al. 2024, arXiv:2410.10989 §3.2 (gradient in the forward pass).
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>

#include <ATen/core/Tensor.h>

#include "ops/logit_rule.hpp"

namespace qlorapp::ops {

/// (loss_sum, grad_hidden). grad_hidden is d(loss_sum)/d(hidden) × grad_scale in hidden's dtype, empty unless need_gradient;
/// grad_scale, one number (default 1), keeps a float16 gradient above underflow and carries the weight of a micro-batch.
///
/// Under autograd loss_sum is differentiable in hidden: the backward pass multiplies the stored grad_hidden by the incoming
/// gradient / grad_scale. A weight that requires a gradient is refused: the head is frozen.
/// target_count is the number of targets >= 0, or -1 if the caller does not know it. A GPU leaves ignored rows out only if it is
/// given, because counting would synchronize; without it they are computed and weighed by nothing. A wrong count throws on the CPU
/// and makes the loss NaN on a GPU. Nothing synchronizes.
/// statistics, float32 (2), is added to: the sum of the entropies −Σ p·log p of the rows' distributions, and the number of rows whose target
/// has the highest logit, the first of equal ones. Those of TRL's SFTTrainer.
/// Throws ValueError naming index and vocabulary for a target >= V (on a GPU: the loss becomes NaN, the gradient of the row
/// 0), and on shapes that do not fit.
std::tuple<at::Tensor, at::Tensor> linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                                        const at::Tensor& targets,
                                                        const std::optional<at::Tensor>& grad_scale = std::nullopt,
                                                        bool need_gradient = true, int64_t chunk_rows = 512,
                                                        int64_t target_count = -1, LogitRule logits = {},
                                                        const std::optional<at::Tensor>& statistics = std::nullopt);

}  // namespace qlorapp::ops
