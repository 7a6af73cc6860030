// SPDX-License-Identifier: Apache-2.0
/// Which device a model goes to.
#pragma once

#include <string>

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include "qlorapp/core/units.hpp"

namespace qlorapp {

/// Whether this build has kernels for GPUs and there is one.
[[nodiscard]] bool has_gpu();

/// "auto" is the current GPU if has_gpu(), else the CPU; "cpu", "cuda" and "cuda:1" name one.
/// @throws ValueError for another text, a GPU that is not there, or one that this build has no kernels for.
[[nodiscard]] at::Device parse_device(const std::string& text);

/// 75 for a T4, 90 for an H200; 0 for the CPU.
[[nodiscard]] int64_t gpu_architecture(at::Device device);

/// As its driver names it, "NVIDIA H200"; empty for the CPU.
[[nodiscard]] std::string gpu_name(at::Device device);

/// The memory that this process may hold there: on a GPU the bytes of torch's allocator and those still free, on a CPU the resident
/// bytes and those that the system reports as available. Asks the driver or /proc. @throws IoError where /proc does not say.
[[nodiscard]] Bytes memory_for(at::Device device);

/// bfloat16 needs a GPU of architecture 80 (Ampere) or newer: an older one computes in float16 instead, with loss scaling.
[[nodiscard]] at::ScalarType usable_dtype(at::ScalarType wanted, int64_t architecture);
/// The same, and one line that says so where it is another.
[[nodiscard]] at::ScalarType dtype_on(int64_t architecture, at::ScalarType wanted);

}  // namespace qlorapp
