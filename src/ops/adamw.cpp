// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/ops/adamw.hpp"

#include <ATen/core/dispatch/Dispatcher.h>

namespace qlorapp::ops {

void adamw_(at::Tensor& parameter, const at::Tensor& gradient, at::Tensor& exp_avg, at::Tensor& exp_avg_sq, int64_t step,
            const AdamW& options) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("qlorapp::adamw_", "")
                             .typed<void(at::Tensor&, const at::Tensor&, at::Tensor&, at::Tensor&, int64_t, double, double,
                                         double, double, double)>();
  op.call(parameter, gradient, exp_avg, exp_avg_sq, step, options.lr, options.beta1, options.beta2, options.eps,
          options.weight_decay);
}

void adamw_8bit_(at::Tensor& parameter, const at::Tensor& gradient, at::Tensor& state1, at::Tensor& state2, at::Tensor& absmax1,
                 at::Tensor& absmax2, int64_t step, const AdamW& options) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("qlorapp::adamw_8bit_", "")
                             .typed<void(at::Tensor&, const at::Tensor&, at::Tensor&, at::Tensor&, at::Tensor&, at::Tensor&,
                                         int64_t, double, double, double, double, double)>();
  op.call(parameter, gradient, state1, state2, absmax1, absmax2, step, options.lr, options.beta1, options.beta2, options.eps,
          options.weight_decay);
}

}  // namespace qlorapp::ops
