// SPDX-License-Identifier: Apache-2.0
/// Which device a model goes to.
#pragma once

#include <string>

#include <c10/core/Device.h>

namespace qlorapp {

/// Whether this build has kernels for GPUs and there is one.
[[nodiscard]] bool has_gpu();

/// "auto" is the current GPU if has_gpu(), else the CPU; "cpu", "cuda" and "cuda:1" name one.
/// @throws ValueError for another text, a GPU that is not there, or one that this build has no kernels for.
[[nodiscard]] at::Device parse_device(const std::string& text);

}  // namespace qlorapp
