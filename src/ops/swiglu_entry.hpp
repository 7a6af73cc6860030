// SPDX-License-Identifier: Apache-2.0
// swiglu's steps on every device: check, allocate the result, call the device's kernel.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "layer_shapes.hpp"
#include "row_views.hpp"

namespace qlorapp::ops {

/// @tparam Device  static functions activate(gate_up, h) and backward(dh, gate_up, d_gate_up, keep_h), which write their
/// results: the
///                 last of rows, never empty, where d_gate_up may be gate_up; with `keep_h` dh becomes h, else it is only read.
template <class Device>
struct SwigluEntry {
  using Tensor = at::Tensor;

  static Tensor swiglu(const Tensor& gate_up) {
    check_swiglu("swiglu", gate_up);
    auto shape = gate_up.sizes().vec();
    shape.back() /= 2;
    Tensor h = at::empty(shape, gate_up.options());
    Device::activate(gate_up, h);
    return h;
  }
  static void swiglu_out(const Tensor& gate_up, Tensor& h) {
    check_swiglu_out("swiglu", gate_up, h);
    Device::activate(gate_up, h);
  }

  static Tensor swiglu_backward(const Tensor& dh, const Tensor& gate_up) {
    check_swiglu_backward("swiglu_backward", dh, gate_up);
    Tensor d_gate_up = at::empty_like(gate_up, at::MemoryFormat::Contiguous);
    if (dh.numel() > 0) Device::backward(as_rows(dh), as_rows(gate_up), as_rows(d_gate_up), /*keep_h=*/false);
    return d_gate_up;
  }
  static void swiglu_backward_(Tensor& dh, Tensor& gate_up) {
    check_swiglu_backward("swiglu_backward_", dh, gate_up);
    if (dh.numel() == 0) return;
    const Tensor both = as_written_rows("swiglu_backward_", "gate_up", gate_up);
    Device::backward(as_written_rows("swiglu_backward_", "dh", dh), both, both, /*keep_h=*/true);
  }

  static void implement(torch::Library& m) {
    m.impl("swiglu", swiglu);
    m.impl("swiglu.out", swiglu_out);
    m.impl("swiglu_backward", swiglu_backward);
    m.impl("swiglu_backward_", swiglu_backward_);
  }
};

}  // namespace qlorapp::ops
