// SPDX-License-Identifier: Apache-2.0
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "../gated_activation_entry.hpp"
#include "cuda/gated_activation.hpp"
#include "launch.hpp"

namespace qlorapp::ops {
namespace {

struct GatedActivation {
  static void activate(const at::Tensor& gate_up, Activation act, const at::Tensor& h) {
    const cuda::Float type = gpu::float_type("gated_activation", gate_up);
    if (h.numel() == 0) return;
    const gpu::Launch launch(gate_up);
    const at::Tensor in = as_rows(gate_up), out = as_written_rows("gated_activation", "h", h);
    C10_CUDA_CHECK(cuda::gated_activation(type, in.const_data_ptr(), in.stride(0), out.mutable_data_ptr(), out.stride(0),
                                          out.size(0), out.size(1), act, launch.stream()));
  }

  static void backward(const at::Tensor& dh, const at::Tensor& gate_up, Activation act, const at::Tensor& d_gate_up, bool keep_h) {
    const cuda::Float type = gpu::float_type("gated_activation_backward", gate_up);
    const gpu::Launch launch(gate_up);
    void* const h = keep_h ? dh.mutable_data_ptr() : const_cast<void*>(dh.const_data_ptr());  // without keep_h it is only read
    C10_CUDA_CHECK(cuda::gated_activation_backward(type, h, dh.stride(0), gate_up.const_data_ptr(), gate_up.stride(0),
                                                   d_gate_up.mutable_data_ptr(), d_gate_up.stride(0), keep_h, dh.size(0),
                                                   dh.size(1), act, launch.stream()));
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(qlorapp, CUDA, m) { GatedActivationEntry<GatedActivation>::implement(m); }

}  // namespace qlorapp::ops
