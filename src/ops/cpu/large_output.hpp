// SPDX-License-Identifier: Apache-2.0
/// Memory for results so large that the kernel's page faults would cost more than computing them.
#pragma once

#include <ATen/core/Tensor.h>

namespace qlorapp::ops {

/// As at::empty on the CPU; asks for huge pages where a result is large and the system gives them on request (Linux, madvise).
/// 64 MiB touched 4 KiB at a time are 16,384 faults, which take several times as long as filling them.
[[nodiscard]] at::Tensor empty_large(at::IntArrayRef shape, const at::TensorOptions& options);

}  // namespace qlorapp::ops
