// SPDX-License-Identifier: Apache-2.0
/// Memory that is asked for and not waited for: into shared memory (cp.async, sm_80 and newer; older code has none), or into the L2 cache.
#pragma once

#include <cstdint>

namespace qlorapp::cuda {
namespace {

constexpr int kLine = 128;  ///< Bytes of the L2 cache that come together.

[[maybe_unused]] __device__ __forceinline__ uint32_t shared_address(const void* place) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(place));
}
template <int kBytes>
__device__ __forceinline__ void copy_async(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
  if constexpr (kBytes == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from));
  else asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from), "n"(kBytes));
#endif
}
/// Asks for the line of memory in the L2 cache.
[[maybe_unused]] __device__ __forceinline__ void prefetch(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}
/// 16 bytes, or as many zeros. The rest of their 256 follows into the L2 cache.
__device__ __forceinline__ void copy_async_or_zero(void* to, const void* from, bool is_there) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(is_there ? 16 : 0)
               : "memory");
#endif
}
__device__ __forceinline__ void end_group() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;");
#endif
}
/// Until at most kLeft of the groups that this thread ended are on their way.
template <int kLeft>
__device__ __forceinline__ void wait_groups() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
#endif
}

}  // namespace
}  // namespace qlorapp::cuda
