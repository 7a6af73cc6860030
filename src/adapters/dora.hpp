// SPDX-License-Identifier: Apache-2.0
/// Weight-decomposed adapters: base and update together are scaled row by row to a trained magnitude.
///
///     y = c ∘ (x·Wᵀ + s·x·Aᵀ·Bᵀ)        c = m / n        n = ‖W + s·B·A‖ of each row, taken as a constant in backward
///
/// m begins at n, so that an adapter with B = 0 begins as its base. n needs no dense weight in a step: with w = ‖W‖² of each
/// row, formed once, n² = w + 2s·Σ_r (W·Aᵀ)∘B + s²·Σ_r (B·A·Aᵀ)∘B, and W·Aᵀ is one product of the packed weight with r rows.
/// Source: Liu et al. 2024, arXiv:2402.09353 §4.3 (the detached norm); PEFT's tuners/lora/dora.py, whose dropout rule is
/// followed too.
#pragma once

#include <ATen/core/Tensor.h>

#include "adapters/lora_projection.hpp"

namespace qlorapp {

struct DoraScale {
  at::Tensor norm;   ///< n, (out) float32.
  at::Tensor scale;  ///< c, (out) float32.
};

/// ‖W‖² of each row, (out) float32. Forms the dense weight in float32 while it runs.
[[nodiscard]] at::Tensor squared_row_norms(const FrozenWeight& weight);

/// n for the values that the adapter has now. @param adapter  with weight_norm_squared. Does not synchronize.
[[nodiscard]] at::Tensor dora_norm(const FrozenWeight& weight, const LoraAdapter& adapter);
[[nodiscard]] DoraScale dora_scale(const FrozenWeight& weight, const LoraAdapter& adapter);

}  // namespace qlorapp
