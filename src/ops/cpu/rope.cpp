// SPDX-License-Identifier: Apache-2.0
#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "../layer_shapes.hpp"
#include "rows.hpp"

namespace qlorapp::ops {
namespace {

using simd::accumulate_t;
using simd::narrow;
using simd::rounded;
using simd::widen;

/// One head of one token; `y` may be `x`. `direction` is 1, or -1 to turn back.
template <class T>
void rotate(const T* x, T* y, const float* cos, const float* sin, float direction, int64_t half) {
  using A = accumulate_t<T>;
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    const A c = rounded<T>(static_cast<A>(cos[i]));
    const A s = rounded<T>(static_cast<A>(sin[i] * direction));
    const A x1 = widen(x[i]), x2 = widen(x[i + half]);
    y[i] = narrow<T>(rounded<T>(x1 * c) - rounded<T>(x2 * s));
    y[i + half] = narrow<T>(rounded<T>(x2 * c) + rounded<T>(x1 * s));
  }
}

void rotate_all(const at::Tensor& x, const at::Tensor& y, const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& positions,
                bool inverse) {
  const at::Tensor c = cos.contiguous(), s = sin.contiguous(), p = positions.contiguous();
  const auto* position = p.const_data_ptr<int64_t>();
  const int64_t tokens = x.size(0), heads = x.size(1), half = x.size(2) / 2, table = c.size(0);
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
    cpu::for_rows(tokens, heads * half * 2, [=](int64_t m) {
      const int64_t row = position[m] * half;
      for (int64_t h = 0; h < heads; ++h) rotate(px + m * xm + h * xh, py + m * ym + h * yh, pc + row, ps + row, direction, half);
    });
  });
}

at::Tensor rope(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& positions, bool inverse) {
  check_rope("rope", x, cos, sin, positions);
  at::Tensor y = at::empty_like(x, at::MemoryFormat::Contiguous);
  rotate_all(x.stride(2) == 1 ? x : x.contiguous(), y, cos, sin, positions, inverse);
  return y;
}

void rope_(at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& positions, bool inverse) {
  check_rope("rope_", x, cos, sin, positions);
  TORCH_CHECK_VALUE(x.stride(2) == 1, "[rope_] each head of x must be contiguous, because it is written; got strides ", x.strides(),
                    ". Use rope, or a contiguous tensor.");
  rotate_all(x, x, cos, sin, positions, inverse);
}

void rope_backward_qkv_(at::Tensor& dqkv, const at::Tensor& dq, const at::Tensor& dk, const at::Tensor& dv, const at::Tensor& cos,
                        const at::Tensor& sin, const at::Tensor& positions) {
  check_rope_backward_qkv("rope_backward_qkv_", dqkv, dq, dk, dv, cos, sin, positions);
  const int64_t heads = dq.size(1), kv_heads = dk.size(1), d = dq.size(2);
  const at::Tensor all = cpu::as_written_rows("rope_backward_qkv_", "dqkv", dqkv).unflatten(1, {heads + 2 * kv_heads, d});
  const auto turned_into = [&](int64_t begin, const at::Tensor& from) {
    rotate_all(from.stride(2) == 1 ? from : from.contiguous(), all.narrow(1, begin, from.size(1)), cos, sin, positions, true);
  };
  turned_into(0, dq);
  turned_into(heads, dk);
  all.narrow(1, heads + kv_heads, kv_heads).copy_(dv);
}

}  // namespace

TORCH_LIBRARY_IMPL(qlorapp, CPU, m) {
  m.impl("rope", rope);
  m.impl("rope_", rope_);
  m.impl("rope_backward_qkv_", rope_backward_qkv_);
}

}  // namespace qlorapp::ops
