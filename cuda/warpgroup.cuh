// SPDX-License-Identifier: Apache-2.0
/// The tensor cores' product of a warpgroup (wgmma, sm_90a): 64 rows of A in registers, B in shared memory, fp32 sums. It runs while its warps go on.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace qlorapp::cuda {
namespace {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// B: rows of 128 bytes, at 1,024 bytes, whose pieces of 16 are exchanged by the row's last three bits. 16 k further is 2 more.
__device__ __forceinline__ uint64_t matrix_of(const void* place) {
  const auto address = static_cast<uint64_t>(__cvta_generic_to_shared(place));
  constexpr uint64_t kEightRows = uint64_t{1024 / 16} << 32U, kExchanged = uint64_t{1} << 62U, kLeading = uint64_t{1} << 16U;
  return (address & 0x3FFFFU) >> 4U | kLeading | kEightRows | kExchanged;
}

/// A warpgroup's registers a thread, of those that the launch gave all: fewer, or more when others keep fewer.
template <int kCount>
__device__ __forceinline__ void keep_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

/// A barrier in shared memory: each turn of it ends with so many arrivals and all bytes that were asked for.
__device__ __forceinline__ void prepare_arrival(uint64_t* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(barrier))), "r"(count)
               : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(barrier)))
               : "memory");
}
/// Arrives when the thread's copies (cp.async) are there.
__device__ __forceinline__ void arrive_after_copies(uint64_t* barrier) {
  asm volatile(
      "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(barrier)))
      : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
/// Bytes that follow each other, which a single thread asks for; it arrives. Products see what was copied so.
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

/// Registers that products read or write have their values here.
template <int kCount>
__device__ __forceinline__ void settle(uint32_t (&a)[kCount][4]) {
#pragma unroll
  for (int j = 0; j < kCount; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(a[j][i])::"memory");
}
template <int kTiles>
__device__ __forceinline__ void settle(float (&sums)[kTiles][4]) {
#pragma unroll
  for (int j = 0; j < kTiles; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(sums[j][i])::"memory");
}
template <int kTiles, int kCount>
__device__ __forceinline__ void begin_products(float (&sums)[kTiles][4], uint32_t (&a)[kCount][4]) {
  settle(a);
  settle(sums);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Until at most kLeft of the groups of products that were ended last are running. @param values  of registers that the others read or wrote.
template <int kLeft, class Values>
__device__ __forceinline__ void wait_for_products(Values& values) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
  settle(values);
}

/// sums += A·Bᵀ of 16 k. Of lane 4g + t of a warpgroup's warp w: A and sums as of multiply() of tensor_core.cuh, of the rows 16w + g and
/// 16w + g + 8; sums[j] are the columns 8j + 2t and 8j + 2t + 1.
template <class T, int kTiles>
__device__ __forceinline__ void multiply_wide(float (&d)[kTiles][4], const uint32_t (&a)[4], uint64_t b) {
  static_assert(kTiles == 2 || kTiles == 4 || kTiles == 8 || kTiles == 16);
  // NOLINTBEGIN(cppcoreguidelines-macro-usage): an instruction's text is a literal, and its operands are so many
#define SUMS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define SUMS_16 SUMS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define SUMS_32 SUMS_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SUMS_64                                                                                                                \
  SUMS_32                                                                                                                      \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, " \
  "%56, "                                                                                                                      \
  "%57, %58, %59, %60, %61, %62, %63"
#define TILE(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define TILES_2 TILE(0), TILE(1)
#define TILES_4 TILES_2, TILE(2), TILE(3)
#define TILES_8 TILES_4, TILE(4), TILE(5), TILE(6), TILE(7)
#define TILES_16 TILES_8, TILE(8), TILE(9), TILE(10), TILE(11), TILE(12), TILE(13), TILE(14), TILE(15)
#define PRODUCT(columns, type, sums, operands, ...)                                                                  \
  asm volatile(                                                                                                      \
      "{.reg .pred p; setp.eq.b32 p, 0, 0;"                                                                          \
      "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type " {" sums "}, " operands ", p, 1, 1, 0;}" \
      : __VA_ARGS__                                                                                                  \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define PRODUCT_OF(type)                                                                              \
  if constexpr (kTiles == 2) PRODUCT("16", type, SUMS_8, "{%8, %9, %10, %11}, %12", TILES_2);         \
  else if constexpr (kTiles == 4) PRODUCT("32", type, SUMS_16, "{%16, %17, %18, %19}, %20", TILES_4); \
  else if constexpr (kTiles == 8) PRODUCT("64", type, SUMS_32, "{%32, %33, %34, %35}, %36", TILES_8); \
  else PRODUCT("128", type, SUMS_64, "{%64, %65, %66, %67}, %68", TILES_16)
  if constexpr (std::is_same_v<T, __half>) {
    PRODUCT_OF("f16");
  } else {
    PRODUCT_OF("bf16");
  }
#undef PRODUCT_OF
#undef PRODUCT
#undef TILES_16
#undef TILES_8
#undef TILES_4
#undef TILES_2
#undef TILE
#undef SUMS_64
#undef SUMS_32
#undef SUMS_16
#undef SUMS_8
  // NOLINTEND(cppcoreguidelines-macro-usage)
}

#endif

}  // namespace
}  // namespace qlorapp::cuda
