// SPDX-License-Identifier: Apache-2.0
/// Memory for results so large that the kernel's page faults would cost more than computing them.
#pragma once

#include <ATen/core/Tensor.h>

namespace qlorapp::ops {

/// As at::empty on the CPU. A result of 4 MiB or more gets memory of its own in huge pages, where the system gives them on request
/// (Linux, madvise), and the memory of the last one that was freed is used again: 64 MiB touched for the first time are 16,384 faults,
/// or 64 MiB that the kernel must clear, and either takes several times as long as filling them. What waits there, 256 MiB at most,
/// is the system's to take when it is short.
[[nodiscard]] at::Tensor empty_large(at::IntArrayRef shape, const at::TensorOptions& options);

}  // namespace qlorapp::ops
