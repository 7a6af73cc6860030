// SPDX-License-Identifier: Apache-2.0
/// Launches that begin while the kernel before them still drains (sm_90 and newer): the CTAs take their places, then wait for
/// all its writes. That hides a launch's latency, one to two microseconds, and changes nothing else.
///
/// The wait is an instruction that exists in code for sm_90 and newer only. Older PTX, compiled by the driver on such a GPU,
/// has no wait: it is asked which it is before it is launched early.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>

#include "types.hpp"

namespace qlorapp::cuda {
namespace {

/// Every kernel that launch_early() launches calls it before it touches memory that a kernel could have written or could still
/// read, but to ask for it in the L2 cache. From here on the kernel after it may take its places likewise.
__device__ __forceinline__ void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/// ask() with the current device, asked once for each; false where there is no device.
template <class Ask>
bool once_a_device(std::atomic<signed char> (&known)[64], const Ask& ask) {
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= 64) return false;
  const signed char answer = known[device].load(std::memory_order_relaxed);
  if (answer != 0) return answer > 0;
  const bool result = ask();
  if (!result) cudaGetLastError();  // a question that failed is no error of the launch that follows
  known[device].store(result ? 1 : -1, std::memory_order_relaxed);
  return result;
}

/// Of the code of `kernel` for the current device, 90 for sm_90, be the device what it may; 0 where there is none.
inline int architecture_of_code(const void* kernel) {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess ? attributes.ptxVersion : 0;
}

template <auto kKernel, class Work>
cudaError_t launch_early(dim3 grid, unsigned threads, size_t shared_bytes, Stream stream, const Work& work) {
  static std::atomic<signed char> known[64];
  const auto* const kernel = reinterpret_cast<const void*>(kKernel);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = once_a_device(known, [&] { return architecture_of_code(kernel) >= 90; }) ? 1 : 0;
  return cudaLaunchKernelEx(&config, kKernel, work);
}

}  // namespace
}  // namespace qlorapp::cuda
