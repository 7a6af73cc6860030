// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/ops/adamw.hpp"

#include <ATen/core/dispatch/Dispatcher.h>

namespace qlorapp::ops {

std::tuple<at::Tensor, at::Tensor, at::Tensor> gradient_norm(const at::Tensor& gradient,
                                                             const std::optional<at::Tensor>& inverse_scale, double max_norm) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("qlorapp::gradient_norm", "")
          .typed<std::tuple<at::Tensor, at::Tensor, at::Tensor>(const at::Tensor&, const std::optional<at::Tensor>&, double)>();
  return op.call(gradient, inverse_scale, max_norm);
}

void adamw_(at::Tensor& parameter, const at::Tensor& gradient, at::Tensor& exp_avg, at::Tensor& exp_avg_sq, int64_t step, double lr,
            double beta1, double beta2, double eps, double weight_decay, const std::optional<at::Tensor>& multiplier,
            const std::optional<at::Tensor>& skip) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("qlorapp::adamw_", "")
                             .typed<void(at::Tensor&, const at::Tensor&, at::Tensor&, at::Tensor&, int64_t, double, double, double,
                                         double, double, const std::optional<at::Tensor>&, const std::optional<at::Tensor>&)>();
  op.call(parameter, gradient, exp_avg, exp_avg_sq, step, lr, beta1, beta2, eps, weight_decay, multiplier, skip);
}

void adamw_8bit_(at::Tensor& parameter, const at::Tensor& gradient, at::Tensor& state1, at::Tensor& state2, at::Tensor& absmax1,
                 at::Tensor& absmax2, int64_t step, double lr, double beta1, double beta2, double eps, double weight_decay,
                 const std::optional<at::Tensor>& multiplier, const std::optional<at::Tensor>& skip) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("qlorapp::adamw_8bit_", "")
          .typed<void(at::Tensor&, const at::Tensor&, at::Tensor&, at::Tensor&, at::Tensor&, at::Tensor&, int64_t, double, double,
                      double, double, double, const std::optional<at::Tensor>&, const std::optional<at::Tensor>&)>();
  op.call(parameter, gradient, state1, state2, absmax1, absmax2, step, lr, beta1, beta2, eps, weight_decay, multiplier, skip);
}

}  // namespace qlorapp::ops
