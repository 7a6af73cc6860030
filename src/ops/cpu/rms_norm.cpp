// SPDX-License-Identifier: Apache-2.0
#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "../norm_entry.hpp"
#include "norm_rows.hpp"
#include "rows.hpp"

namespace qlorapp::ops {
namespace {

using simd::accumulate_t;
using simd::narrow;
using simd::widen;

template <class T>
void add_row(const T* a, const T* b, T* sum, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) sum[i] = narrow<T>(widen(a[i]) + widen(b[i]));
}

struct Norm {
  static void normalize(const at::Tensor& x, const at::Tensor& weight, double eps, NormRule rule, const at::Tensor& y,
                        const at::Tensor& rstd) {
    if (x.numel() == 0) return;
    const at::Tensor in = cpu::as_rows(x), out = cpu::as_written_rows("rms_norm", "y", y);
    const at::Tensor w = weight.contiguous();
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, x.scalar_type(), "rms_norm", [&] {
      const auto* px = in.const_data_ptr<scalar_t>();
      const auto* pw = w.const_data_ptr<scalar_t>();
      auto* py = out.mutable_data_ptr<scalar_t>();
      auto* ps = rstd.mutable_data_ptr<accumulate_t<scalar_t>>();
      const int64_t n = in.size(1), stride = in.stride(0), y_stride = out.stride(0);
      cpu::with_rule(rule, [&]<NormRule known>() {
        cpu::for_rows(in.size(0), n, [=](int64_t row) {
          ps[row] = cpu::normalize_row<known>(px + row * stride, pw, py + row * y_stride, n, eps);
        });
      });
    });
  }

  /// @tparam add  dx += the gradient, and dy becomes y.
  template <bool add>
  static void backward_into(const at::Tensor& dx, const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight,
                            const at::Tensor& rstd, NormRule rule) {
    if (x.numel() == 0) return;
    const at::Tensor in = cpu::as_rows(x), out = cpu::as_written_rows("rms_norm_backward_", "dx", dx);
    const at::Tensor grad = add ? cpu::as_written_rows("rms_norm_backward_", "dy", dy) : cpu::as_rows(dy);
    const at::Tensor w = weight.contiguous(), statistic = rstd.contiguous();
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, x.scalar_type(), "rms_norm_backward", [&] {
      const auto* px = in.const_data_ptr<scalar_t>();
      const auto* pg = grad.const_data_ptr<scalar_t>();
      const auto* pw = w.const_data_ptr<scalar_t>();
      const auto* ps = statistic.const_data_ptr<accumulate_t<scalar_t>>();
      auto* po = out.mutable_data_ptr<scalar_t>();
      const int64_t n = in.size(1), x_stride = in.stride(0), g_stride = grad.stride(0), o_stride = out.stride(0);
      cpu::with_rule(rule, [&]<NormRule known>() {
        cpu::for_rows(in.size(0), n, [=](int64_t row) {
          cpu::normalize_row_backward<known, add>(pg + row * g_stride, px + row * x_stride, pw, ps[row], po + row * o_stride, n);
          if constexpr (add)
            cpu::scale_row<known>(px + row * x_stride, pw, ps[row], const_cast<scalar_t*>(pg) + row * g_stride, n);  // written rows
        });
      });
    });
  }

  static void add_and_normalize(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight, double eps,
                                NormRule rule, const at::Tensor& sum, const at::Tensor& y, const at::Tensor& rstd) {
    if (x.numel() == 0) return;
    const at::Tensor in = cpu::as_rows(x), other = cpu::as_rows(residual);
    const at::Tensor total = cpu::as_written_rows("add_rms_norm", "sum", sum), out = cpu::as_written_rows("add_rms_norm", "y", y);
    const at::Tensor w = weight.contiguous();
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, x.scalar_type(), "add_rms_norm", [&] {
      const auto* px = in.const_data_ptr<scalar_t>();
      const auto* pr = other.const_data_ptr<scalar_t>();
      const auto* pw = w.const_data_ptr<scalar_t>();
      auto* pt = total.mutable_data_ptr<scalar_t>();
      auto* py = out.mutable_data_ptr<scalar_t>();
      auto* ps = rstd.mutable_data_ptr<accumulate_t<scalar_t>>();
      const int64_t n = in.size(1), x_stride = in.stride(0), r_stride = other.stride(0);
      const int64_t t_stride = total.stride(0), y_stride = out.stride(0);
      cpu::with_rule(rule, [&]<NormRule known>() {
        cpu::for_rows(in.size(0), n, [=](int64_t row) {
          scalar_t* t = pt + row * t_stride;
          add_row(px + row * x_stride, pr + row * r_stride, t, n);
          ps[row] = cpu::normalize_row<known>(t, pw, py + row * y_stride, n, eps);
        });
      });
    });
  }

  static void backward(const at::Tensor& dx, const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight,
                       const at::Tensor& rstd, NormRule rule, bool accumulate) {
    if (accumulate) backward_into<true>(dx, dy, x, weight, rstd, rule);
    else backward_into<false>(dx, dy, x, weight, rstd, rule);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(qlorapp, CPU, m) { NormEntry<Norm>::implement(m); }

}  // namespace qlorapp::ops
