// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "../layer_shapes.hpp"
#include "norm_rows.hpp"
#include "rows.hpp"

namespace qlorapp::ops {
namespace {

using simd::accumulate_t;
using simd::narrow;
using simd::rounded;
using simd::widen;

/// One head of one token; `y` may be `x`. `direction` is 1, or -1 to turn back.
template <bool interleaved, class T>
void rotate(const T* x, T* y, const float* cos, const float* sin, float direction, int64_t half) {
  using A = accumulate_t<T>;
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    const A c = rounded<T>(static_cast<A>(cos[i]));
    const A s = rounded<T>(static_cast<A>(sin[i] * direction));
    const int64_t first = interleaved ? 2 * i : i, second = interleaved ? first + 1 : i + half;
    const A x1 = widen(x[first]), x2 = widen(x[second]);
    y[first] = narrow<T>(rounded<T>(x1 * c) - rounded<T>(x2 * s));
    y[second] = narrow<T>(rounded<T>(x2 * c) + rounded<T>(x1 * s));
  }
}

void rotate_all(const at::Tensor& x, const at::Tensor& y, const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& positions,
                bool inverse, bool interleaved = false) {
  const at::Tensor c = cos.contiguous(), s = sin.contiguous(), p = positions.contiguous();
  const auto* position = p.const_data_ptr<int64_t>();
  const int64_t tokens = x.size(0), heads = x.size(1), width = x.size(2), half = c.size(1), table = c.size(0);
  for (int64_t m = 0; m < tokens; ++m) {
    TORCH_CHECK_VALUE(position[m] >= 0 && position[m] < table, "[rope] positions must lie in [0, ", table,
                      "), the rows of cos and sin; got ", position[m], " at token ", m, ". Build tables for the longest sequence.");
  }
  if (x.numel() == 0) return;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, x.scalar_type(), "rope", [&] {
    const auto* px = x.const_data_ptr<scalar_t>();
    auto* py = y.mutable_data_ptr<scalar_t>();
    const auto* pc = c.const_data_ptr<float>();
    const auto* ps = s.const_data_ptr<float>();
    const int64_t xm = x.stride(0), xh = x.stride(1), ym = y.stride(0), yh = y.stride(1);
    const float direction = inverse ? -1.0f : 1.0f;
    const bool copies = px != py && 2 * half < width;
    cpu::for_rows(tokens, heads * width, [=](int64_t m) {
      const float *const row_c = pc + position[m] * half, *const row_s = ps + position[m] * half;
      for (int64_t h = 0; h < heads; ++h) {
        const scalar_t* const from = px + m * xm + h * xh;
        scalar_t* const to = py + m * ym + h * yh;
        if (interleaved) rotate<true>(from, to, row_c, row_s, direction, half);
        else rotate<false>(from, to, row_c, row_s, direction, half);
        if (copies) std::copy(from + 2 * half, from + width, to + 2 * half);
      }
    });
  });
}

/// The elements of a head lie together.
at::Tensor unit_stride_heads(const at::Tensor& x) { return x.stride(2) == 1 ? x : x.contiguous(); }

at::Tensor rope(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& positions, bool inverse,
                bool interleaved) {
  check_rope("rope", x, cos, sin, positions);
  at::Tensor y = at::empty_like(x, at::MemoryFormat::Contiguous);
  rotate_all(unit_stride_heads(x), y, cos, sin, positions, inverse, interleaved);
  return y;
}

void rope_(at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& positions, bool inverse,
           bool interleaved) {
  check_rope("rope_", x, cos, sin, positions);
  TORCH_CHECK_VALUE(x.stride(2) == 1, "[rope_] each head of x must be contiguous, because it is written; got strides ", x.strides(),
                    ". Use rope, or a contiguous tensor.");
  rotate_all(x, x, cos, sin, positions, inverse, interleaved);
}

void rope_backward_qkv_(at::Tensor& dqkv, const at::Tensor& dq, const at::Tensor& dk, const at::Tensor& dv, const at::Tensor& cos,
                        const at::Tensor& sin, const at::Tensor& positions, bool interleaved) {
  check_rope_backward_qkv("rope_backward_qkv_", dqkv, dq, dk, dv, cos, sin, positions);
  const int64_t heads = dq.size(1), kv_heads = dk.size(1), d = dq.size(2);
  const at::Tensor all = cpu::as_written_rows("rope_backward_qkv_", "dqkv", dqkv).unflatten(1, {heads + 2 * kv_heads, d});
  const auto turned_into = [&](int64_t begin, const at::Tensor& from) {
    rotate_all(unit_stride_heads(from), all.narrow(1, begin, from.size(1)), cos, sin, positions, true, interleaved);
  };
  turned_into(0, dq);
  turned_into(heads, dk);
  all.narrow(1, heads + kv_heads, kv_heads).copy_(dv);
}

at::Tensor rms_norm_rope(const at::Tensor& x_in, const at::Tensor& q_weight, const at::Tensor& k_weight, int64_t q_heads,
                         double eps, const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& positions, int64_t rule) {
  check_rms_norm_rope("rms_norm_rope", x_in, q_weight, k_weight, q_heads, cos, sin, positions);
  const at::Tensor x = unit_stride_heads(x_in), wq = q_weight.contiguous(), wk = k_weight.contiguous();
  at::Tensor y = at::empty_like(x_in, at::MemoryFormat::Contiguous);
  if (x.numel() == 0) return y;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, x.scalar_type(), "rms_norm_rope", [&] {
    const auto *px = x.const_data_ptr<scalar_t>(), *pq = wq.const_data_ptr<scalar_t>(), *pk = wk.const_data_ptr<scalar_t>();
    auto* py = y.mutable_data_ptr<scalar_t>();
    const int64_t heads = x.size(1), d = x.size(2), xm = x.stride(0), xh = x.stride(1);
    cpu::with_rule(norm_rule(rule), [&]<NormRule known>() {
      cpu::for_rows(x.size(0), heads * d, [=](int64_t m) {
        for (int64_t h = 0; h < heads; ++h)
          cpu::normalize_row<known>(px + m * xm + h * xh, h < q_heads ? pq : pk, py + (m * heads + h) * d, d, eps);
      });
    });
  });
  rotate_all(y, y, cos, sin, positions, false);
  return y;
}

void rms_norm_rope_backward_qkv_(at::Tensor& dqkv, const at::Tensor& dq, const at::Tensor& dk, const at::Tensor& dv,
                                 const at::Tensor& x_in, const at::Tensor& q_weight, const at::Tensor& k_weight, double eps,
                                 const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& positions, int64_t rule) {
  check_rms_norm_rope_backward("rms_norm_rope_backward_qkv_", dqkv, dq, dk, dv, x_in, q_weight, k_weight, cos, sin, positions);
  rope_backward_qkv_(dqkv, dq, dk, dv, cos, sin, positions, /*interleaved=*/false);
  if (x_in.numel() == 0) return;
  const at::Tensor x = unit_stride_heads(x_in), wq = q_weight.contiguous(), wk = k_weight.contiguous();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, x.scalar_type(), "rms_norm_rope_backward_qkv_", [&] {
    const auto *px = x.const_data_ptr<scalar_t>(), *pq = wq.const_data_ptr<scalar_t>(), *pk = wk.const_data_ptr<scalar_t>();
    auto* pd = dqkv.mutable_data_ptr<scalar_t>();
    const int64_t heads = x.size(1), q_heads = dq.size(1), d = x.size(2), xm = x.stride(0), xh = x.stride(1), dm = dqkv.stride(0);
    cpu::with_rule(norm_rule(rule), [&]<NormRule known>() {
      cpu::for_rows(x.size(0), heads * d, [=](int64_t m) {
        for (int64_t h = 0; h < heads; ++h) {
          const scalar_t* const own = px + m * xm + h * xh;
          scalar_t* const place = pd + m * dm + h * d;
          cpu::normalize_row_backward<known, false>(place, own, h < q_heads ? pq : pk, cpu::rstd_of_row(own, d, eps), place, d);
        }
      });
    });
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(qlorapp, CPU, m) {
  m.impl("rope", rope);
  m.impl("rope_", rope_);
  m.impl("rope_backward_qkv_", rope_backward_qkv_);
  m.impl("rms_norm_rope", rms_norm_rope);
  m.impl("rms_norm_rope_backward_qkv_", rms_norm_rope_backward_qkv_);
}

}  // namespace qlorapp::ops
