// SPDX-License-Identifier: Apache-2.0
// The norms' steps on every device: check, allocate the results, call the device's kernel.
#pragma once

#include <tuple>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "layer_shapes.hpp"

namespace qlorapp::ops {

/// @tparam Device  static functions normalize(x, weight, eps, rule, y, rstd), add_and_normalize(x, residual, weight, eps, rule, sum, y,
///                 rstd) and backward(dx, dy, x, weight, rstd, rule, accumulate), which write their results; with `accumulate` dy
///                 becomes y, too.
template <class Device>
struct NormEntry {
  using Tensor = at::Tensor;

  static Tensor empty_statistic(const Tensor& x) {
    return at::empty(x.sizes().slice(0, x.sizes().size() - 1), x.options().dtype(accumulate_type(x)));
  }

  static std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, const Tensor& weight, double eps, int64_t rule) {
    check_rms_norm("rms_norm", x, weight);
    Tensor y = at::empty_like(x, at::MemoryFormat::Contiguous), rstd = empty_statistic(x);
    Device::normalize(x, weight, eps, norm_rule(rule), y, rstd);
    return {y, rstd};
  }
  static void rms_norm_out(const Tensor& x, const Tensor& weight, double eps, int64_t rule, Tensor& y, Tensor& rstd) {
    check_rms_norm("rms_norm", x, weight);
    check_rms_norm_out("rms_norm", x, y, rstd);
    Device::normalize(x, weight, eps, norm_rule(rule), y, rstd);
  }

  static std::tuple<Tensor, Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps,
                                                         int64_t rule) {
    check_rms_norm("add_rms_norm", x, weight);
    check_same_shape("add_rms_norm", "residual", residual, "x", x);
    Tensor sum = at::empty_like(x, at::MemoryFormat::Contiguous), y = at::empty_like(sum), rstd = empty_statistic(x);
    Device::add_and_normalize(x, residual, weight, eps, norm_rule(rule), sum, y, rstd);
    return {sum, y, rstd};
  }
  static void add_rms_norm_out(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps, int64_t rule, Tensor& sum,
                               Tensor& y, Tensor& rstd) {
    check_rms_norm("add_rms_norm", x, weight);
    check_same_shape("add_rms_norm", "residual", residual, "x", x);
    check_same_shape("add_rms_norm", "sum", sum, "x", x);
    check_rms_norm_out("add_rms_norm", x, y, rstd);
    Device::add_and_normalize(x, residual, weight, eps, norm_rule(rule), sum, y, rstd);
  }

  static Tensor rms_norm_backward(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& rstd, int64_t rule) {
    check_rms_norm_backward("rms_norm_backward", dy, x, weight, rstd);
    Tensor dx = at::empty_like(x, at::MemoryFormat::Contiguous);
    Device::backward(dx, dy, x, weight, rstd, norm_rule(rule), /*accumulate=*/false);
    return dx;
  }
  static void rms_norm_backward_(Tensor& dx, Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& rstd, int64_t rule) {
    check_rms_norm_backward("rms_norm_backward_", dy, x, weight, rstd);
    check_same_shape("rms_norm_backward_", "dx", dx, "x", x);
    Device::backward(dx, dy, x, weight, rstd, norm_rule(rule), /*accumulate=*/true);
  }

  static void implement(torch::Library& m) {
    m.impl("rms_norm", rms_norm);
    m.impl("rms_norm.out", rms_norm_out);
    m.impl("rms_norm_backward", rms_norm_backward);
    m.impl("rms_norm_backward_", rms_norm_backward_);
    m.impl("add_rms_norm", add_rms_norm);
    m.impl("add_rms_norm.out", add_rms_norm_out);
  }
};

}  // namespace qlorapp::ops
