// SPDX-License-Identifier: Apache-2.0
// What AdamW does to shapes: nothing. The arguments are checked as on a device, so that tracing finds the same mistakes.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "../adamw_check.hpp"

namespace qlorapp::ops {
namespace {

void adamw_meta(at::Tensor& parameter, const at::Tensor& gradient, at::Tensor& exp_avg, at::Tensor& exp_avg_sq, int64_t step,
                double lr, double beta1, double beta2, double eps, double weight_decay, const std::optional<at::Tensor>& multiplier,
                const std::optional<at::Tensor>& skip) {
  detail::check_adamw(parameter, gradient, exp_avg, exp_avg_sq, step, lr, beta1, beta2, eps, weight_decay, multiplier, skip);
}

void adamw_8bit_meta(at::Tensor& parameter, const at::Tensor& gradient, at::Tensor& state1, at::Tensor& state2, at::Tensor& absmax1,
                     at::Tensor& absmax2, int64_t step, double lr, double beta1, double beta2, double eps, double weight_decay,
                     const std::optional<at::Tensor>& multiplier, const std::optional<at::Tensor>& skip) {
  detail::check_adamw_8bit(parameter, gradient, state1, state2, absmax1, absmax2, step, lr, beta1, beta2, eps, weight_decay,
                           multiplier, skip);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> gradient_norm_meta(const at::Tensor& gradient,
                                                                  const std::optional<at::Tensor>& inverse_scale, double max_norm) {
  detail::check_gradient_norm(gradient, inverse_scale, max_norm);
  const auto number = [&] { return at::empty({}, gradient.options()); };
  return {number(), number(), number()};
}

}  // namespace

TORCH_LIBRARY_IMPL(qlorapp, Meta, m) {
  m.impl("gradient_norm", gradient_norm_meta);
  m.impl("adamw_", adamw_meta);
  m.impl("adamw_8bit_", adamw_8bit_meta);
}

}  // namespace qlorapp::ops
