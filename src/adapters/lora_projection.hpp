// SPDX-License-Identifier: Apache-2.0
/// The one forward and backward of a frozen projection with a low-rank update, below every face of it: LoraLinear in a user's
/// own loop, DecoderBlock in the trainer's, and modules injected into foreign models.
///
///     forward     u = drop(x)·Aᵀ                 y = x·Wᵀ + s·u·Bᵀ
///     backward    v = s·dy·B                     dB += s·dyᵀ·u     dA += vᵀ·drop(x)     dx = dy·W + drop'(v·A)
///
/// With a magnitude (DoRA, adapters/dora.hpp) and c the scale of each row, z = drop(x)·Wᵀ + s·u·Bᵀ without its dropout in front:
///
///     forward     y = x·Wᵀ + c∘z − drop(x)·Wᵀ        (= c∘z where nothing is dropped)
///     backward    v = s·(c∘dy)·B     dm += Σ_rows dy∘z / n     dx = dy·W + drop'(((c − 1)∘dy)·W + v·A)     dB with c∘dy for dy
///
/// x (M, in), y (M, out), A (r, in), B (out, r), u and v (M, r); s = scaling. W is frozen: it has no gradient.
/// A and B are float32 masters and are rounded to the dtype of x for the products, as autocast does; gradients are float32.
/// Source: Hu et al. 2021, arXiv:2106.09685 §4; dropout on the input of A only, as in PEFT.
#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "core/philox.hpp"
#include "qlorapp/adapters/lora_adapter.hpp"

namespace qlorapp {

/// Where the gradients of one adapter are added: slices of an arena, or fresh zeros under autograd.
struct LoraGradients {
  at::Tensor a;               ///< (r, in) float32.
  at::Tensor b;               ///< (out, r) float32.
  at::Tensor magnitude = {};  ///< (out) float32 with DoRA.
};

/// gradient += scale · leftᵀ·right: the product in the dtype of its factors, the sum in the gradient's. A GPU adds 16-bit factors up in a
/// float32 gradient within the product itself.
void add_transposed_product(const at::Tensor& gradient, const at::Tensor& left, const at::Tensor& right, double scale);

/// Writes y; returns u, (M, r) in the dtype of x, for the backward pass. Without an adapter u is undefined.
/// @param y  (M, out), may be a column slice. Does not synchronize.  @param bias  (out), frozen; a magnitude does not scale it.
at::Tensor lora_projection_forward(at::Tensor& y, const at::Tensor& x, const FrozenWeight& weight, const LoraAdapter* adapter,
                                   const std::optional<DropoutKey>& dropout, const at::Tensor& bias = {});

/// u alone: drop(x)·Aᵀ in the dtype of x. What a recompute that stops before the projection still needs.
[[nodiscard]] at::Tensor lora_input_product(const at::Tensor& x, const LoraAdapter& adapter,
                                            const std::optional<DropoutKey>& dropout);

/// The half of backward that needs no input: forms dx unless it is null, and returns v = s·dy·B, (M, r), or an undefined tensor
/// without an adapter.
/// @param dx  (M, in) or null where no gradient of the input is wanted (the first block: embeddings are frozen).
/// @param accumulate_dx  add to dx instead of overwriting it.
at::Tensor lora_projection_backward_input(at::Tensor* dx, bool accumulate_dx, const at::Tensor& dy, const FrozenWeight& weight,
                                          const LoraAdapter* adapter, const std::optional<DropoutKey>& dropout);

/// The half that does: adds dA and dB (and dm) into `gradients`.
/// @param x  the input of the forward pass, (M, in).  @param u  what forward returned.  @param v  what the other half returned.
/// @param weight  read with DoRA only, whose magnitude needs the output before scaling: it is formed again.
void lora_projection_backward_adapter(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& u, const at::Tensor& v,
                                      const FrozenWeight& weight, const LoraAdapter& adapter,
                                      const std::optional<DropoutKey>& dropout, const LoraGradients& gradients);

}  // namespace qlorapp
