// SPDX-License-Identifier: Apache-2.0
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "../layer_shapes.hpp"
#include "../row_views.hpp"
#include "cuda/swiglu.hpp"
#include "launch.hpp"

namespace qlorapp::ops {
namespace {

void activate_into(const at::Tensor& gate_up, const at::Tensor& h) {
  const cuda::Float type = gpu::float_type("swiglu", gate_up);
  if (h.numel() == 0) return;
  const gpu::Launch launch(gate_up);
  const at::Tensor in = as_rows(gate_up), out = as_written_rows("swiglu", "h", h);
  C10_CUDA_CHECK(cuda::swiglu(type, in.const_data_ptr(), in.stride(0), out.mutable_data_ptr(), out.stride(0), out.size(0),
                              out.size(1), launch.stream()));
}

at::Tensor swiglu(const at::Tensor& gate_up) {
  check_swiglu("swiglu", gate_up);
  auto shape = gate_up.sizes().vec();
  shape.back() /= 2;
  at::Tensor h = at::empty(shape, gate_up.options());
  activate_into(gate_up, h);
  return h;
}

void swiglu_out(const at::Tensor& gate_up, at::Tensor& h) {
  check_swiglu_out("swiglu", gate_up, h);
  activate_into(gate_up, h);
}

at::Tensor swiglu_backward(const at::Tensor& dh, const at::Tensor& gate_up) {
  check_swiglu_backward("swiglu_backward", dh, gate_up);
  const cuda::Float type = gpu::float_type("swiglu_backward", gate_up);
  at::Tensor d_gate_up = at::empty_like(gate_up, at::MemoryFormat::Contiguous);
  if (dh.numel() == 0) return d_gate_up;
  const gpu::Launch launch(gate_up);
  const at::Tensor in = as_rows(gate_up), grad = as_rows(dh), out = as_rows(d_gate_up);
  C10_CUDA_CHECK(cuda::swiglu_backward(type, const_cast<void*>(grad.const_data_ptr()), grad.stride(0), in.const_data_ptr(),
                                       in.stride(0), out.mutable_data_ptr(), out.stride(0), /*keep_h=*/false, grad.size(0),
                                       grad.size(1), launch.stream()));  // without keep_h dh is only read
  return d_gate_up;
}

void swiglu_backward_(at::Tensor& dh, at::Tensor& gate_up) {
  check_swiglu_backward("swiglu_backward_", dh, gate_up);
  const cuda::Float type = gpu::float_type("swiglu_backward_", gate_up);
  if (dh.numel() == 0) return;
  const gpu::Launch launch(gate_up);
  const at::Tensor both = as_written_rows("swiglu_backward_", "gate_up", gate_up);
  const at::Tensor grad = as_written_rows("swiglu_backward_", "dh", dh);
  C10_CUDA_CHECK(cuda::swiglu_backward(type, grad.mutable_data_ptr(), grad.stride(0), both.const_data_ptr(), both.stride(0),
                                       both.mutable_data_ptr(), both.stride(0), /*keep_h=*/true, grad.size(0), grad.size(1),
                                       launch.stream()));
}

}  // namespace

TORCH_LIBRARY_IMPL(qlorapp, CUDA, m) {
  m.impl("swiglu", swiglu);
  m.impl("swiglu.out", swiglu_out);
  m.impl("swiglu_backward", swiglu_backward);
  m.impl("swiglu_backward_", swiglu_backward_);
}

}  // namespace qlorapp::ops
