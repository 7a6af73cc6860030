// SPDX-License-Identifier: Apache-2.0
#include "ops/adamw.hpp"

#include "ops/operator.hpp"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

namespace qlorapp::ops {

std::tuple<at::Tensor, at::Tensor, at::Tensor> gradient_norm(const at::Tensor& gradient,
                                                             const std::optional<at::Tensor>& inverse_scale, double max_norm) {
  static const auto op =
      Operator<std::tuple<at::Tensor, at::Tensor, at::Tensor>(const at::Tensor&, const std::optional<at::Tensor>&, double)>(
          "qlorapp::gradient_norm");
  return op.call(gradient, inverse_scale, max_norm);
}

std::vector<at::Tensor> adamw_moments(const at::Tensor& values, bool eight_bit) {
  if (!eight_bit) return {at::zeros_like(values), at::zeros_like(values)};
  // A zero moment is the code of 0.0 in each map, with a scale of zero.
  const auto codes = values.options().dtype(at::kByte);
  const int64_t blocks = adamw_8bit_blocks(values.numel());
  return {at::full(values.sizes(), kAdamW8bitZeroState1, codes), at::full(values.sizes(), kAdamW8bitZeroState2, codes),
          at::zeros({blocks}, values.options()), at::zeros({blocks}, values.options())};
}

void adamw_(at::Tensor& parameter, const at::Tensor& gradient, at::Tensor& exp_avg, at::Tensor& exp_avg_sq, int64_t step, double lr,
            double beta1, double beta2, double eps, double weight_decay, const std::optional<at::Tensor>& multiplier,
            const std::optional<at::Tensor>& skip) {
  static const auto op =
      Operator<void(at::Tensor&, const at::Tensor&, at::Tensor&, at::Tensor&, int64_t, double, double, double, double, double,
                    const std::optional<at::Tensor>&, const std::optional<at::Tensor>&)>("qlorapp::adamw_");
  op.call(parameter, gradient, exp_avg, exp_avg_sq, step, lr, beta1, beta2, eps, weight_decay, multiplier, skip);
}

void adamw_8bit_(at::Tensor& parameter, const at::Tensor& gradient, at::Tensor& state1, at::Tensor& state2, at::Tensor& absmax1,
                 at::Tensor& absmax2, int64_t step, double lr, double beta1, double beta2, double eps, double weight_decay,
                 const std::optional<at::Tensor>& multiplier, const std::optional<at::Tensor>& skip) {
  static const auto op =
      Operator<void(at::Tensor&, const at::Tensor&, at::Tensor&, at::Tensor&, at::Tensor&, at::Tensor&, int64_t, double, double,
                    double, double, double, const std::optional<at::Tensor>&, const std::optional<at::Tensor>&)>(
          "qlorapp::adamw_8bit_");
  op.call(parameter, gradient, state1, state2, absmax1, absmax2, step, lr, beta1, beta2, eps, weight_decay, multiplier, skip);
}

}  // namespace qlorapp::ops
