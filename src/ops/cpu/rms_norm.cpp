// SPDX-License-Identifier: Apache-2.0
#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "../norm_entry.hpp"
#include "rows.hpp"

namespace qlorapp::ops {
namespace {

using simd::accumulate_t;
using simd::narrow;
using simd::rounded;
using simd::widen;

/// Single precision within 512 elements, double across: as exact as one rounding at the end, at vector speed.
template <class A, class Term>
double blocked_sum(int64_t n, const Term& term) {
  double total = 0.0;
  for (int64_t begin = 0; begin < n; begin += 512) {
    const int64_t end = std::min<int64_t>(n, begin + 512);
    A sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = begin; i < end; ++i) sum += term(i);
    total += static_cast<double>(sum);
  }
  return total;
}

template <class T>
void scale_row(const T* x, const T* weight, accumulate_t<T> rstd, T* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] = narrow<T>(rounded<T>(widen(x[i]) * rstd) * widen(weight[i]));
}

template <class T>
accumulate_t<T> normalize_row(const T* x, const T* weight, T* y, int64_t n, double eps) {
  using A = accumulate_t<T>;
  const double squares = blocked_sum<A>(n, [&](int64_t i) { return widen(x[i]) * widen(x[i]); });
  const A mean = static_cast<A>(squares / static_cast<double>(n));
  const A rstd = A{1} / std::sqrt(mean + static_cast<A>(eps));
  scale_row(x, weight, rstd, y, n);
  return rstd;
}

template <class T>
void add_row(const T* a, const T* b, T* sum, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) sum[i] = narrow<T>(widen(a[i]) + widen(b[i]));
}

/// dx = rstd·(g − x̂·mean(g·x̂)) with g = dy·weight and x̂ = x·rstd. `add`: dx += that, after its own rounding.
template <class T, bool add>
void normalize_row_backward(const T* dy, const T* x, const T* weight, accumulate_t<T> rstd, T* dx, int64_t n) {
  using A = accumulate_t<T>;
  const double dot = blocked_sum<A>(n, [&](int64_t i) { return rounded<T>(widen(dy[i]) * widen(weight[i])) * widen(x[i]); });
  const A slope = static_cast<A>(dot / static_cast<double>(n)) * rstd * rstd * rstd;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const A g = rounded<T>(widen(dy[i]) * widen(weight[i])) * rstd - slope * widen(x[i]);
    dx[i] = narrow<T>(add ? widen(dx[i]) + rounded<T>(g) : g);
  }
}

struct Norm {
  static void normalize(const at::Tensor& x, const at::Tensor& weight, double eps, const at::Tensor& y, const at::Tensor& rstd) {
    if (x.numel() == 0) return;
    const at::Tensor in = cpu::as_rows(x), out = cpu::as_written_rows("rms_norm", "y", y);
    const at::Tensor w = weight.contiguous();
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, x.scalar_type(), "rms_norm", [&] {
      const auto* px = in.const_data_ptr<scalar_t>();
      const auto* pw = w.const_data_ptr<scalar_t>();
      auto* py = out.mutable_data_ptr<scalar_t>();
      auto* ps = rstd.mutable_data_ptr<accumulate_t<scalar_t>>();
      const int64_t n = in.size(1), stride = in.stride(0), y_stride = out.stride(0);
      cpu::for_rows(in.size(0), n,
                    [=](int64_t row) { ps[row] = normalize_row(px + row * stride, pw, py + row * y_stride, n, eps); });
    });
  }

  /// @tparam add  dx += the gradient, and dy becomes y.
  template <bool add>
  static void backward_into(const at::Tensor& dx, const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight,
                            const at::Tensor& rstd) {
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
      cpu::for_rows(in.size(0), n, [=](int64_t row) {
        normalize_row_backward<scalar_t, add>(pg + row * g_stride, px + row * x_stride, pw, ps[row], po + row * o_stride, n);
        if constexpr (add)
          scale_row(px + row * x_stride, pw, ps[row], const_cast<scalar_t*>(pg) + row * g_stride, n);  // written rows
      });
    });
  }

  static void add_and_normalize(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight, double eps,
                                const at::Tensor& sum, const at::Tensor& y, const at::Tensor& rstd) {
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
      cpu::for_rows(in.size(0), n, [=](int64_t row) {
        scalar_t* t = pt + row * t_stride;
        add_row(px + row * x_stride, pr + row * r_stride, t, n);
        ps[row] = normalize_row<scalar_t>(t, pw, py + row * y_stride, n, eps);
      });
    });
  }

  static void backward(const at::Tensor& dx, const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight,
                       const at::Tensor& rstd, bool accumulate) {
    if (accumulate) backward_into<true>(dx, dy, x, weight, rstd);
    else backward_into<false>(dx, dy, x, weight, rstd);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(qlorapp, CPU, m) { NormEntry<Norm>::implement(m); }

}  // namespace qlorapp::ops
