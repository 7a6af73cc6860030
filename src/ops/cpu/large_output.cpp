// SPDX-License-Identifier: Apache-2.0
#include "large_output.hpp"

#include <cstdint>

#include <ATen/ATen.h>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace qlorapp::ops {

at::Tensor empty_large(at::IntArrayRef shape, const at::TensorOptions& options) {
  at::Tensor result = at::empty(shape, options);
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr size_t kLarge = size_t{4} << 20;
  if (result.nbytes() >= kLarge) {
    static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto address = reinterpret_cast<uintptr_t>(result.mutable_data_ptr());
    const uintptr_t begin = address / page * page;
    const uintptr_t end = (address + result.nbytes() + page - 1) / page * page;
    // A wish: it moves no data and changes no contents, so nothing depends on its result.
    static_cast<void>(madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE));
  }
#endif
  return result;
}

}  // namespace qlorapp::ops
