// SPDX-License-Identifier: Apache-2.0
/// Clipping by the global norm of the gradients.
///
///     norm = ‖(‖g₁‖₂, ‖g₂‖₂, …)‖₂        coefficient = min(1, max_norm / (norm + 1e-6))        g ← g · coefficient
///
/// The norm of each parameter's gradient first, then the norm of those norms, as torch.nn.utils.clip_grad_norm_ does, so that
/// roundings are the same. Multiplying by 1 where nothing is to be clipped saves asking the device.
///
/// Source: Pascanu et al. 2013, arXiv:1211.5063 §3.2; torch.nn.utils.clip_grad_norm_.
#pragma once

#include <cstdint>
#include <span>

#include <ATen/core/Tensor.h>

#include "qlorapp/adapters/adapter_arena.hpp"

namespace qlorapp {

/// @param gradients  floating, any shapes, one device; undefined entries are skipped.
/// @returns (), the global norm: 0 without gradients, not finite if an element is not. Does not synchronize.
[[nodiscard]] at::Tensor global_norm(at::TensorList gradients);

/// The same over an arena: parameter k's gradient is flat[ends[k − 1] … ends[k]). Does not synchronize.
/// @param flat  (n), fp32.  @param ends  rising, the last is at most n; elements after it are padding.
[[nodiscard]] at::Tensor global_norm(const at::Tensor& flat, std::span<const int64_t> ends);

/// Scales the gradients in place so that their norm is at most max_norm. Does not synchronize.
/// @param norm  what global_norm() returned for them.  @param max_norm  > 0; 0 leaves them alone, as in TrainingArguments.
/// @throws ValueError if max_norm is negative or NaN.
void clip_by_norm_(at::TensorList gradients, const at::Tensor& norm, double max_norm);

/// Both together. @returns the norm before clipping, which is what `grad_norm` in a log means.
at::Tensor clip_grad_norm_(at::TensorList gradients, double max_norm);
/// Of gradients in one buffer; `ends` are where each parameter's ends.
at::Tensor clip_grad_norm_(at::Tensor& flat, std::span<const int64_t> ends, double max_norm);

/// The result of one pass over an arena's gradients. The step unscales and clips them as it reads them, or changes nothing.
/// float32 () each, on the arena's device.
struct GradientNorm {
  at::Tensor norm;        ///< ‖g / S‖₂ before clipping: what `grad_norm` in a log means.
  at::Tensor found_inf;   ///< 1 if an element of g / S is not finite, else 0.
  at::Tensor multiplier;  ///< coefficient / S.
};

/// Changes no gradient. On a GPU two launches and one norm over the whole (ops::gradient_norm), which differs from torch's norm
/// of norms in the last bits. Does not synchronize.
/// @param inverse_scale  GradScaler::inverse_scale(): 1 / S, or undefined for 1.  @param max_norm  as above.
[[nodiscard]] GradientNorm gradient_norm(const AdapterArena& arena, const at::Tensor& inverse_scale, double max_norm);

}  // namespace qlorapp
