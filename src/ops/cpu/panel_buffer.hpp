// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace qlorapp::ops::cpu {

/// At least `bytes`, at the start of a page. One buffer for each thread that calls, kept for its life: the next call may return the
/// same.
/// @throws KernelOutOfMemory
void* panel_buffer(size_t bytes);

}  // namespace qlorapp::ops::cpu
