// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/train/clip.hpp"

#include <optional>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "core/check.hpp"
#include "ops/adamw.hpp"

namespace qlorapp {

at::Tensor global_norm(at::TensorList gradients) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> present;
  present.reserve(gradients.size());
  for (const at::Tensor& gradient : gradients) {
    if (gradient.defined()) present.push_back(gradient);
  }
  if (present.empty()) return at::zeros({});
  return at::linalg_vector_norm(at::stack(at::_foreach_norm(present, 2)), 2);
}

at::Tensor global_norm(const at::Tensor& flat, std::span<const int64_t> ends) {
  std::vector<at::Tensor> parts;
  parts.reserve(ends.size());
  int64_t begin = 0;
  for (const int64_t end : ends) {
    QLORAPP_CHECK_VALUE(begin <= end && end <= flat.numel(),
                        "[global_norm] ends must rise and stay within {} elements; got {} after {}.", flat.numel(), end, begin);
    parts.push_back(flat.slice(0, begin, end));
    begin = end;
  }
  return global_norm(parts);
}

void clip_by_norm_(at::TensorList gradients, const at::Tensor& norm, double max_norm) {
  QLORAPP_CHECK_VALUE(max_norm >= 0, "[clip_grad_norm_] max_norm must be >= 0; got {}. 0 turns clipping off.", max_norm);
  if (max_norm == 0) return;
  const at::NoGradGuard no_grad;
  const at::Tensor coefficient = at::clamp_max(max_norm / (norm + 1e-6), 1.0);
  for (const at::Tensor& gradient : gradients) {
    if (gradient.defined()) gradient.mul_(coefficient);
  }
}

at::Tensor clip_grad_norm_(at::TensorList gradients, double max_norm) {
  at::Tensor norm = global_norm(gradients);
  clip_by_norm_(gradients, norm, max_norm);
  return norm;
}

at::Tensor clip_grad_norm_(at::Tensor& flat, std::span<const int64_t> ends, double max_norm) {
  at::Tensor norm = global_norm(flat, ends);
  clip_by_norm_(flat, norm, max_norm);
  return norm;
}

GradientNorm gradient_norm(const AdapterArena& arena, const at::Tensor& inverse_scale, double max_norm) {
  const at::NoGradGuard no_grad;
  const std::optional<at::Tensor> inverse = inverse_scale.defined() ? std::optional(inverse_scale) : std::nullopt;
  auto [norm, found_inf, multiplier] = ops::gradient_norm(arena.gradients(), inverse, max_norm);
  if (arena.gradients().is_cuda()) return {norm, found_inf, multiplier};
  std::vector<at::Tensor> gradients;
  gradients.reserve(static_cast<size_t>(arena.size()));
  for (int64_t i = 0; i < arena.size(); ++i) gradients.push_back(arena.gradient(i));
  norm = global_norm(gradients);
  if (inverse) norm = norm * *inverse;  // S is a power of two: the bits of the norm of unscaled gradients
  multiplier = max_norm > 0 ? at::clamp_max(max_norm / (norm + 1e-6), 1.0) : at::ones({}, norm.options());
  if (inverse) multiplier = multiplier * *inverse;
  return {norm, found_inf, multiplier};
}

}  // namespace qlorapp
