// SPDX-License-Identifier: Apache-2.0
/// The gated activation of Llama's MLP on the GPU: the rule and rounding points of src/ops/gated_activation.hpp.
///
/// Against the CPU operator: float is bit-equal (the same polynomial for e^x, the same roundings). In 16 bits e^x and the
/// division are the GPU's fast ones, some 4 float ulp off, so that memory and not arithmetic is the limit; a result differs
/// only where that crosses a rounding boundary (below 0.5 % of the elements, by one ulp of silu, two of h; gradients beside the
/// zero of silu' by more ulp of a small value).
#pragma once

#include <cstdint>

#include <driver_types.h>

#include "qlorapp/format/family.hpp"
#include "types.hpp"

namespace qlorapp::cuda {

using format::Activation;

/// h = act(gate)·up. gate_up: rows of 2·width, gate first; strides of rows in elements.
cudaError_t gated_activation(Float type, const void* gate_up, int64_t gate_up_stride, void* h, int64_t h_stride, int64_t rows,
                             int64_t width, Activation act, Stream stream);

/// d_gate_up from dh; may lie over gate_up. With `keep_h`, dh becomes h.
cudaError_t gated_activation_backward(Float type, void* dh, int64_t dh_stride, const void* gate_up, int64_t gate_up_stride,
                                      void* d_gate_up, int64_t d_gate_up_stride, bool keep_h, int64_t rows, int64_t width,
                                      Activation act, Stream stream);

}  // namespace qlorapp::cuda
