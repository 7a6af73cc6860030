// SPDX-License-Identifier: Apache-2.0
// gated_activation's steps on every device: check, allocate the result, call the device's kernel.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "layer_shapes.hpp"
#include "row_views.hpp"

namespace qlorapp::ops {

/// @tparam Device  static functions activate(gate_up, act, h) and backward(dh, gate_up, act, d_gate_up, keep_h), which write their
/// results: the
///                 last of rows, never empty, where d_gate_up may be gate_up; with `keep_h` dh becomes h, else it is only read.
template <class Device>
struct GatedActivationEntry {
  using Tensor = at::Tensor;

  static Tensor gated_activation(const Tensor& gate_up, int64_t act) {
    check_gated_activation("gated_activation", gate_up);
    auto shape = gate_up.sizes().vec();
    shape.back() /= 2;
    Tensor h = at::empty(shape, gate_up.options());
    Device::activate(gate_up, activation(act), h);
    return h;
  }
  static void gated_activation_out(const Tensor& gate_up, int64_t act, Tensor& h) {
    check_gated_activation_out("gated_activation", gate_up, h);
    Device::activate(gate_up, activation(act), h);
  }

  static Tensor gated_activation_backward(const Tensor& dh, const Tensor& gate_up, int64_t act) {
    check_gated_activation_backward("gated_activation_backward", dh, gate_up);
    Tensor d_gate_up = at::empty_like(gate_up, at::MemoryFormat::Contiguous);
    if (dh.numel() > 0) Device::backward(as_rows(dh), as_rows(gate_up), activation(act), as_rows(d_gate_up), /*keep_h=*/false);
    return d_gate_up;
  }
  static void gated_activation_backward_(Tensor& dh, Tensor& gate_up, int64_t act) {
    check_gated_activation_backward("gated_activation_backward_", dh, gate_up);
    if (dh.numel() == 0) return;
    const Tensor both = as_written_rows("gated_activation_backward_", "gate_up", gate_up);
    Device::backward(as_written_rows("gated_activation_backward_", "dh", dh), both, activation(act), both, /*keep_h=*/true);
  }

  static void implement(torch::Library& m) {
    m.impl("gated_activation", gated_activation);
    m.impl("gated_activation.out", gated_activation_out);
    m.impl("gated_activation_backward", gated_activation_backward);
    m.impl("gated_activation_backward_", gated_activation_backward_);
  }
};

}  // namespace qlorapp::ops
