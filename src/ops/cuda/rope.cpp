// SPDX-License-Identifier: Apache-2.0
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "../layer_shapes.hpp"
#include "../row_views.hpp"
#include "cuda/norm_rope.hpp"
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
  [[nodiscard]] cuda::Rotation rotation(bool inverse, bool interleaved = false) const {
    return {cos.const_data_ptr<float>(),
            sin.const_data_ptr<float>(),
            positions.const_data_ptr<int64_t>(),
            cos.size(1),
            inverse,
            interleaved};
  }
};

void rotate(std::string_view op, const at::Tensor& x, const at::Tensor& y, const at::Tensor& cos, const at::Tensor& sin,
            const at::Tensor& positions, bool inverse, bool interleaved) {
  const cuda::Float type = gpu::float_type(op, x);
  const Tables tables(op, x, cos, sin, positions);
  if (x.numel() == 0) return;
  const gpu::Launch launch(x);
  C10_CUDA_CHECK(cuda::rope(type, heads_of(x), y.mutable_data_ptr(), y.stride(0), y.stride(1),
                            tables.rotation(inverse, interleaved), x.size(0), x.size(2), launch.stream()));
}

at::Tensor rope(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& positions, bool inverse,
                bool interleaved) {
  check_rope("rope", x, cos, sin, positions);
  at::Tensor y = at::empty_like(x, at::MemoryFormat::Contiguous);
  rotate("rope", unit_stride_heads(x), y, cos, sin, positions, inverse, interleaved);
  return y;
}

void rope_(at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& positions, bool inverse,
           bool interleaved) {
  check_rope("rope_", x, cos, sin, positions);
  TORCH_CHECK_VALUE(x.stride(2) == 1, "[rope_] each head of x must be contiguous, because it is written; got strides ", x.strides(),
                    ". Use rope, or a contiguous tensor.");
  rotate("rope_", x, x, cos, sin, positions, inverse, interleaved);
}

void rope_backward_qkv_(at::Tensor& dqkv, const at::Tensor& dq_in, const at::Tensor& dk_in, const at::Tensor& dv_in,
                        const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& positions, bool interleaved) {
  constexpr std::string_view kOp = "rope_backward_qkv_";
  check_rope_backward_qkv(kOp, dqkv, dq_in, dk_in, dv_in, cos, sin, positions);
  const cuda::Float type = gpu::float_type(kOp, dqkv);
  const Tables tables(kOp, dqkv, cos, sin, positions);
  if (dqkv.numel() == 0) return;
  const at::Tensor out = as_written_rows(kOp, "dqkv", dqkv);
  const gpu::Launch launch(dqkv);
  const at::Tensor dq = unit_stride_heads(dq_in), dk = unit_stride_heads(dk_in), dv = unit_stride_heads(dv_in);
  C10_CUDA_CHECK(cuda::rope_packed(type, heads_of(dq), heads_of(dk), heads_of(dv), out.mutable_data_ptr(), out.stride(0),
                                   tables.rotation(/*inverse=*/true, interleaved), dq.size(0), dq.size(2), launch.stream()));
}

/// The two norms as kernels read them.
struct HeadNorms {
  at::Tensor q, k;
  cuda::HeadNorm norm;

  HeadNorms(std::string_view op, const at::Tensor& x, const at::Tensor& q_weight, const at::Tensor& k_weight, int64_t q_heads,
            double eps, int64_t rule)
      : q(q_weight.contiguous()), k(k_weight.contiguous()) {
    TORCH_CHECK_VALUE(x.size(2) <= 512, "[", op, "] heads may be 512 wide on a GPU; got ", x.size(2),
                      ". Norm and turn them apart.");
    norm = {q.const_data_ptr(), k.const_data_ptr(), q_heads, static_cast<float>(eps), norm_rule(rule)};
  }
};

at::Tensor rms_norm_rope(const at::Tensor& x_in, const at::Tensor& q_weight, const at::Tensor& k_weight, int64_t q_heads,
                         double eps, const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& positions, int64_t rule) {
  constexpr std::string_view kOp = "rms_norm_rope";
  check_rms_norm_rope(kOp, x_in, q_weight, k_weight, q_heads, cos, sin, positions);
  const cuda::Float type = gpu::float_type(kOp, x_in);
  const Tables tables(kOp, x_in, cos, sin, positions);
  at::Tensor y = at::empty_like(x_in, at::MemoryFormat::Contiguous);
  if (x_in.numel() == 0) return y;
  const gpu::Launch launch(x_in);
  const at::Tensor x = unit_stride_heads(x_in);
  const HeadNorms norms(kOp, x, q_weight, k_weight, q_heads, eps, rule);
  C10_CUDA_CHECK(cuda::rms_norm_rope(type, heads_of(x), y.mutable_data_ptr(), norms.norm, tables.rotation(false), x.size(0),
                                     x.size(2) / 2, launch.stream()));
  return y;
}

void rms_norm_rope_backward_qkv_(at::Tensor& dqkv, const at::Tensor& dq_in, const at::Tensor& dk_in, const at::Tensor& dv_in,
                                 const at::Tensor& x_in, const at::Tensor& q_weight, const at::Tensor& k_weight, double eps,
                                 const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& positions, int64_t rule) {
  constexpr std::string_view kOp = "rms_norm_rope_backward_qkv_";
  check_rms_norm_rope_backward(kOp, dqkv, dq_in, dk_in, dv_in, x_in, q_weight, k_weight, cos, sin, positions);
  const cuda::Float type = gpu::float_type(kOp, dqkv);
  const Tables tables(kOp, dqkv, cos, sin, positions);
  if (dqkv.numel() == 0) return;
  const at::Tensor out = as_written_rows(kOp, "dqkv", dqkv);
  const gpu::Launch launch(dqkv);
  const at::Tensor dq = unit_stride_heads(dq_in), dk = unit_stride_heads(dk_in), dv = unit_stride_heads(dv_in);
  const at::Tensor x = unit_stride_heads(x_in);
  const HeadNorms norms(kOp, x, q_weight, k_weight, dq.size(1), eps, rule);
  C10_CUDA_CHECK(cuda::rms_norm_rope_backward(type, heads_of(dq), heads_of(dk), heads_of(dv), heads_of(x), out.mutable_data_ptr(),
                                              out.stride(0), norms.norm, tables.rotation(/*inverse=*/false), x.size(0),
                                              x.size(2) / 2, launch.stream()));
}

}  // namespace

TORCH_LIBRARY_IMPL(qlorapp, CUDA, m) {
  m.impl("rope", rope);
  m.impl("rope_", rope_);
  m.impl("rope_backward_qkv_", rope_backward_qkv_);
  m.impl("rms_norm_rope", rms_norm_rope);
  m.impl("rms_norm_rope_backward_qkv_", rms_norm_rope_backward_qkv_);
}

}  // namespace qlorapp::ops
