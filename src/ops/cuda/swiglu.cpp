// SPDX-License-Identifier: Apache-2.0
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "../swiglu_entry.hpp"
#include "cuda/swiglu.hpp"
#include "launch.hpp"

namespace qlorapp::ops {
namespace {

struct Swiglu {
  static void activate(const at::Tensor& gate_up, const at::Tensor& h) {
    const cuda::Float type = gpu::float_type("swiglu", gate_up);
    if (h.numel() == 0) return;
    const gpu::Launch launch(gate_up);
    const at::Tensor in = as_rows(gate_up), out = as_written_rows("swiglu", "h", h);
    C10_CUDA_CHECK(cuda::swiglu(type, in.const_data_ptr(), in.stride(0), out.mutable_data_ptr(), out.stride(0), out.size(0),
                                out.size(1), launch.stream()));
  }

  static void backward(const at::Tensor& dh, const at::Tensor& gate_up, const at::Tensor& d_gate_up, bool keep_h) {
    const cuda::Float type = gpu::float_type("swiglu_backward", gate_up);
    const gpu::Launch launch(gate_up);
    void* const h = keep_h ? dh.mutable_data_ptr() : const_cast<void*>(dh.const_data_ptr());  // without keep_h it is only read
    C10_CUDA_CHECK(cuda::swiglu_backward(type, h, dh.stride(0), gate_up.const_data_ptr(), gate_up.stride(0),
                                         d_gate_up.mutable_data_ptr(), d_gate_up.stride(0), keep_h, dh.size(0), dh.size(1),
                                         launch.stream()));
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(qlorapp, CUDA, m) { SwigluEntry<Swiglu>::implement(m); }

}  // namespace qlorapp::ops
