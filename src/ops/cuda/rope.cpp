// SPDX-License-Identifier: Apache-2.0
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "../layer_shapes.hpp"
#include "../row_views.hpp"
#include "cuda/rope.hpp"
#include "launch.hpp"

namespace qlorapp::ops {
namespace {

/// The elements of a head lie together.
at::Tensor unit_stride_heads(const at::Tensor& x) { return x.stride(2) == 1 ? x : x.contiguous(); }

cuda::Heads heads_of(const at::Tensor& x) { return {x.const_data_ptr(), x.stride(0), x.stride(1), x.size(1)}; }

/// Tables and positions as kernels read them.
struct Tables {
  at::Tensor cos, sin, positions;

  Tables(std::string_view op, const at::Tensor& x, const at::Tensor& c, const at::Tensor& s, const at::Tensor& p)
      : cos(c.contiguous()), sin(s.contiguous()), positions(p.contiguous()) {
    gpu::check_device(op, "cos", cos, x);
    gpu::check_device(op, "sin", sin, x);
    gpu::check_device(op, "positions", positions, x);
  }
  [[nodiscard]] cuda::Rotation rotation(bool inverse) const {
    return {cos.const_data_ptr<float>(), sin.const_data_ptr<float>(), positions.const_data_ptr<int64_t>(), inverse};
  }
};

void rotate(std::string_view op, const at::Tensor& x, const at::Tensor& y, const at::Tensor& cos, const at::Tensor& sin,
            const at::Tensor& positions, bool inverse) {
  const cuda::Float type = gpu::float_type(op, x);
  const Tables tables(op, x, cos, sin, positions);
  if (x.numel() == 0) return;
  const gpu::Launch launch(x);
  C10_CUDA_CHECK(cuda::rope(type, heads_of(x), y.mutable_data_ptr(), y.stride(0), y.stride(1), tables.rotation(inverse), x.size(0),
                            x.size(2) / 2, launch.stream()));
}

at::Tensor rope(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& positions, bool inverse) {
  check_rope("rope", x, cos, sin, positions);
  at::Tensor y = at::empty_like(x, at::MemoryFormat::Contiguous);
  rotate("rope", unit_stride_heads(x), y, cos, sin, positions, inverse);
  return y;
}

void rope_(at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& positions, bool inverse) {
  check_rope("rope_", x, cos, sin, positions);
  TORCH_CHECK_VALUE(x.stride(2) == 1, "[rope_] each head of x must be contiguous, because it is written; got strides ", x.strides(),
                    ". Use rope, or a contiguous tensor.");
  rotate("rope_", x, x, cos, sin, positions, inverse);
}

void rope_backward_qkv_(at::Tensor& dqkv, const at::Tensor& dq_in, const at::Tensor& dk_in, const at::Tensor& dv_in,
                        const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& positions) {
  constexpr std::string_view kOp = "rope_backward_qkv_";
  check_rope_backward_qkv(kOp, dqkv, dq_in, dk_in, dv_in, cos, sin, positions);
  const cuda::Float type = gpu::float_type(kOp, dqkv);
  const Tables tables(kOp, dqkv, cos, sin, positions);
  if (dqkv.numel() == 0) return;
  const at::Tensor out = as_written_rows(kOp, "dqkv", dqkv);
  const gpu::Launch launch(dqkv);
  const at::Tensor dq = unit_stride_heads(dq_in), dk = unit_stride_heads(dk_in), dv = unit_stride_heads(dv_in);
  C10_CUDA_CHECK(cuda::rope_packed(type, heads_of(dq), heads_of(dk), heads_of(dv), out.mutable_data_ptr(), out.stride(0),
                                   tables.rotation(/*inverse=*/true), dq.size(0), dq.size(2) / 2, launch.stream()));
}

}  // namespace

TORCH_LIBRARY_IMPL(qlorapp, CUDA, m) {
  m.impl("rope", rope);
  m.impl("rope_", rope_);
  m.impl("rope_backward_qkv_", rope_backward_qkv_);
}

}  // namespace qlorapp::ops
