// SPDX-License-Identifier: Apache-2.0
/// The tensor cores' product of a warpgroup (wgmma, sm_90a): 64 rows of A in registers, B in shared memory, fp32 sums. It runs while its warps go on.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace qlorapp::cuda {
namespace {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// B: rows of 128 bytes, at 1,024 bytes, whose pieces of 16 are exchanged by the row's last three bits. 16 k further is 2 more.
__device__ __forceinline__ uint64_t matrix_of(const void* place) {
  const auto address = static_cast<uint64_t>(__cvta_generic_to_shared(place));
  constexpr uint64_t kEightRows = uint64_t{1024 / 16} << 32U, kExchanged = uint64_t{1} << 62U, kLeading = uint64_t{1} << 16U;
  return (address & 0x3FFFFU) >> 4U | kLeading | kEightRows | kExchanged;
}

/// A barrier in shared memory for copies of bytes that follow each other, which a single thread asks for. Products see what they wrote.
__device__ __forceinline__ void prepare_arrival(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(barrier))) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
/// @param to, from  at 16 bytes, as `bytes` is.
__device__ __forceinline__ void copy_bytes(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  const auto own = static_cast<uint32_t>(__cvta_generic_to_shared(barrier));
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(own), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from), "r"(bytes), "r"(own)
               : "memory");
}
/// @param turn  0 and 1 by turns, from 0 on.
__device__ __forceinline__ void wait_for_arrival(uint64_t* barrier, uint32_t turn) {
  const auto own = static_cast<uint32_t>(__cvta_generic_to_shared(barrier));
  uint32_t there = 0;
  while (there == 0) {
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p;}"
                 : "=r"(there)
                 : "r"(own), "r"(turn)
                 : "memory");
  }
}

/// Registers that products will read or write have their values.
template <int kTiles, int kCount>
__device__ __forceinline__ void begin_products(float (&sums)[kTiles][4], uint32_t (&a)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(a[i])::"memory");
#pragma unroll
  for (int j = 0; j < kTiles; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(sums[j][i])::"memory");
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Until all products have ended.
template <int kTiles>
__device__ __forceinline__ void wait_for_products(float (&sums)[kTiles][4]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int j = 0; j < kTiles; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(sums[j][i])::"memory");
}

/// sums = [sums +] A·Bᵀ of 16 k. Of lane 4g + t of a warpgroup's warp w: A and sums as of multiply() of tensor_core.cuh, of the rows 16w + g and
/// 16w + g + 8; sums[j] are the columns 8j + 2t and 8j + 2t + 1.
template <class T>
__device__ __forceinline__ void multiply_wide(float (&d)[2][4], const uint32_t (&a)[4], uint64_t b, bool adds);
template <class T>
__device__ __forceinline__ void multiply_wide(float (&d)[4][4], const uint32_t (&a)[4], uint64_t b, bool adds);
template <class T>
__device__ __forceinline__ void multiply_wide(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b, bool adds);
template <>
__device__ __forceinline__ void multiply_wide<__nv_bfloat16>(float (&d)[2][4], const uint32_t (&a)[4], uint64_t b, bool adds) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %13, 0;"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, p, 1, 1, 0;}"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(adds)));
}
template <>
__device__ __forceinline__ void multiply_wide<__half>(float (&d)[2][4], const uint32_t (&a)[4], uint64_t b, bool adds) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %13, 0;"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, p, 1, 1, 0;}"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(adds)));
}
template <>
__device__ __forceinline__ void multiply_wide<__nv_bfloat16>(float (&d)[4][4], const uint32_t (&a)[4], uint64_t b, bool adds) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %21, 0;"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, "
      "%15}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;}"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
        "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(adds)));
}
template <>
__device__ __forceinline__ void multiply_wide<__half>(float (&d)[4][4], const uint32_t (&a)[4], uint64_t b, bool adds) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %21, 0;"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "{%16, %17, %18, %19}, %20, p, 1, 1, 0;}"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
        "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(adds)));
}
template <>
__device__ __forceinline__ void multiply_wide<__nv_bfloat16>(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b, bool adds) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %37, 0;"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;}"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
        "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
        "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
        "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(adds)));
}
template <>
__device__ __forceinline__ void multiply_wide<__half>(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b, bool adds) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %37, 0;"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;}"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
        "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
        "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
        "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(adds)));
}

#endif

}  // namespace
}  // namespace qlorapp::cuda
