// SPDX-License-Identifier: Apache-2.0
/// The gated activation of Llama's MLP over one stacked projection.
///
///     h = round(a · up),   a = round(silu(gate)),   silu(g) = g / (1 + e^−g)
///
/// gate_up is (…, 2·I), gate in the first half; h and dh are (…, I) of the same dtype. Computed in float32 (float64 for
/// float64), `round` to the dtype: the rounding points of transformers' LlamaMLP and of its autograd. Rows may lie apart.
/// Source: Shazeer 2020, arXiv:2002.05202.
#pragma once

#include <ATen/core/Tensor.h>

namespace qlorapp::ops {

/// Contiguous. Differentiable.
at::Tensor swiglu(const at::Tensor& gate_up);

/// The same into h, whose rows may lie any distance apart. Outside autograd.
void swiglu_out(const at::Tensor& gate_up, at::Tensor& h);

/// d_up = round(dh · a);  d_gate = round(round(dh · up) · σ·(1 + gate·(1 − σ))) with σ = 1 / (1 + e^−gate). Contiguous (…,
/// 2·I).
at::Tensor swiglu_backward(const at::Tensor& dh, const at::Tensor& gate_up);

/// The same in place and in one pass, outside autograd: gate_up becomes its gradient, and dh becomes h = swiglu(gate_up), which
/// the gradient of the down projection's adapter needs. The two must not overlap; both need contiguous rows.
void swiglu_backward_(at::Tensor& dh, at::Tensor& gate_up);

}  // namespace qlorapp::ops
