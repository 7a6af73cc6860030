// SPDX-License-Identifier: Apache-2.0
/// The gated activation of an MLP over one stacked projection.
///
///     h = round(a · up),   a = round(act(gate)),   silu(g) = g / (1 + e^−g)
///                                                  gelu_tanh(g) = g/2 · (1 + tanh(√(2/π)·(g + 0.044715·g³)))
///
/// gate_up is (…, 2·I), gate in the first half; h and dh are (…, I) of the same dtype. Computed in float32 (float64 for
/// float64), `round` to the dtype: the rounding points of transformers' LlamaMLP and GemmaMLP and of their
/// autograd. Rows may lie apart.
/// Source: Shazeer 2020, arXiv:2002.05202; Hendrycks and Gimpel 2016, arXiv:1606.08415.
#pragma once

#include <ATen/core/Tensor.h>

#include "qlorapp/format/family.hpp"

namespace qlorapp::ops {

using format::Activation;

/// Contiguous. Differentiable.
at::Tensor gated_activation(const at::Tensor& gate_up, Activation act = Activation::kSilu);

/// The same into h, whose rows may lie any distance apart. Outside autograd.
void gated_activation_out(const at::Tensor& gate_up, at::Tensor& h, Activation act = Activation::kSilu);

/// d_up = round(dh · a);  d_gate = round(round(dh · up) · act'(gate)), silu'(g) = σ·(1 + g·(1 − σ)) with σ = 1 / (1 + e^−g). Contiguous (…,
/// 2·I).
at::Tensor gated_activation_backward(const at::Tensor& dh, const at::Tensor& gate_up, Activation act = Activation::kSilu);

/// The same in place and in one pass, outside autograd: gate_up becomes its gradient, and dh becomes h = gated_activation(gate_up), which
/// the gradient of the down projection's adapter needs. The two must not overlap; both need contiguous rows.
void gated_activation_backward_(at::Tensor& dh, at::Tensor& gate_up, Activation act = Activation::kSilu);

}  // namespace qlorapp::ops
