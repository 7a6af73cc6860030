// SPDX-License-Identifier: Apache-2.0
// What AdamW does to shapes: nothing. The arguments are checked as on a device, so that tracing finds the same mistakes.
#include <torch/library.h>

#include "../adamw_check.hpp"

namespace qlorapp::ops {
namespace {

void adamw_meta(at::Tensor& parameter, const at::Tensor& gradient, at::Tensor& exp_avg, at::Tensor& exp_avg_sq, int64_t step,
                double lr, double beta1, double beta2, double eps, double weight_decay) {
  detail::check_adamw(parameter, gradient, exp_avg, exp_avg_sq, step, lr, beta1, beta2, eps, weight_decay);
}

void adamw_8bit_meta(at::Tensor& parameter, const at::Tensor& gradient, at::Tensor& state1, at::Tensor& state2,
                     at::Tensor& absmax1, at::Tensor& absmax2, int64_t step, double lr, double beta1, double beta2, double eps,
                     double weight_decay) {
  detail::check_adamw_8bit(parameter, gradient, state1, state2, absmax1, absmax2, step, lr, beta1, beta2, eps, weight_decay);
}

}  // namespace

TORCH_LIBRARY_IMPL(qlorapp, Meta, m) {
  m.impl("adamw_", adamw_meta);
  m.impl("adamw_8bit_", adamw_8bit_meta);
}

}  // namespace qlorapp::ops
