// SPDX-License-Identifier: Apache-2.0
/// Shared by the kernels of gemm_4bit_group.hpp: among others, the weight that a row belongs to.
#pragma once

#include <atomic>
#include <cstdint>

#include "async_copy.cuh"
#include "code_books.cuh"
#include "early_launch.cuh"
#include "element.cuh"
#include "gemm_4bit_group.hpp"

namespace qlorapp::cuda {

/// More than 8 rows of x (gemm_4bit_more.cu), and the floats between its two launches.
cudaError_t multiply_more_rows(const GemmFourBitGroup& work, int multiprocessors, Stream stream);
int64_t more_rows_floats(const GemmFourBitGroup& work, int multiprocessors);
/// The same on the tensor cores of sm_90a (gemm_4bit_wide.cu), and whether the device and the work are such.
bool goes_wide(const GemmFourBitGroup& work);
cudaError_t multiply_wide_rows(const GemmFourBitGroup& work, int multiprocessors, Stream stream);
int64_t wide_rows_floats(const GemmFourBitGroup& work, int multiprocessors);
/// The same in bf16 without its last launch: sums of parts are left in work.partial. @param laid  x in the product's order; where it is not yet, the
/// first launch lays it there. What is in front in the stream waits for what was before it (early_launch.cuh).
cudaError_t sum_wide_rows(const GemmFourBitGroup& work, unsigned char* laid, bool is_laid, int multiprocessors, Stream stream);
int64_t wide_sums_floats(const GemmFourBitGroup& work, int multiprocessors);

namespace {

constexpr int kBlock = 64, kWarps = 8, kThreads = 32 * kWarps;
constexpr int kMostShared = 232448;  ///< Bytes that a CTA can have on sm_90.
constexpr unsigned kAllLanes = 0xFFFFFFFFU;

/// Until so many threads, of whole warps, have come to this barrier of the CTA. Barrier 0 is __syncthreads()'s.
template <int kCount>
__device__ __forceinline__ void meet(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kCount) : "memory");
}

/// The table of a byte's two values: an entry has them as often as it has room, so that lanes read from banks of their own.
template <int kEntryBytes>
__device__ __forceinline__ void fill_pairs(unsigned char* table, bool nf4, unsigned threads) {
  constexpr unsigned kEach = kEntryBytes / 16;
  const unsigned lane = threadIdx.x & 31U;
  const float entry = __ldg((nf4 ? kDeviceNf4 : kDeviceFp4).values + (lane & 15U));
  for (unsigned byte = threadIdx.x; byte < 256U; byte += threads) {
    const float first = __shfl_sync(kAllLanes, entry, static_cast<int>(byte >> 4U));
    const float second = __shfl_sync(kAllLanes, entry, static_cast<int>(byte & 15U));
#pragma unroll
    for (unsigned i = 0; i < kEach; ++i)
      *reinterpret_cast<float4*>(table + byte * kEntryBytes + ((i + lane) & (kEach - 1U)) * 16U) =
          make_float4(first, second, first, second);
  }
}

struct Work {
  GemmFourBitGroup asked;
  Divisor nested_block;
  bool nested, nf4;
  int64_t first_strip[GemmFourBitGroup::kMostWeights + 1];  ///< Of each weight, in strips of the kernel's height; then of all.
  int64_t first_row[GemmFourBitGroup::kMostWeights + 1];
  int64_t splits;              ///< Of k; of gemm_4bit_wide.cu the CTAs, at most.
  int64_t strips_each, tiles;  ///< Of up to 8 rows of x: strips of a team at a time, and how often that is.
  bool wide_ranks;             ///< Rows of u and B are whole 16 bytes.
  unsigned char* laid;         ///< gemm_4bit_wide.cu's x.
};

/// The weight that a strip belongs to.
__device__ __forceinline__ int weight_of(const Work& work, int64_t strip) {
  int i = 0;
#pragma unroll
  for (int next = 1; next < GemmFourBitGroup::kMostWeights; ++next)
    i += next < work.asked.count && strip >= work.first_strip[next] ? 1 : 0;
  return i;
}

inline Work work_of(const GemmFourBitGroup& asked, int64_t height) {
  Work work{.asked = asked,
            .nested_block = make_divisor(asked.nested_block_size),
            .nested = asked.weights[0].nested_absmax != nullptr,
            .nf4 = asked.quant_type == QuantType::kNf4,
            .first_strip = {},
            .first_row = {},
            .splits = 1,
            .strips_each = 0,
            .tiles = 0,
            .wide_ranks = asked.ranks % 8 == 0 && aligned_to(asked.u, 16),
            .laid = nullptr};
  for (int i = 0; i < asked.count; ++i) {
    work.first_strip[i + 1] = work.first_strip[i] + (asked.weights[i].n + height - 1) / height;
    work.first_row[i + 1] = work.first_row[i] + asked.weights[i].n;
    work.wide_ranks = work.wide_ranks && asked.weights[i].rank % 8 == 0 && asked.weights[i].u_column % 8 == 0 &&
                      aligned_to(asked.weights[i].b, 16);
  }
  return work;
}

template <class Kernel>
cudaError_t allow(Kernel kernel, int bytes, std::atomic<signed char> (&known)[64]) {
  const bool allowed = once_a_device(
      known, [&] { return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) == cudaSuccess; });
  return allowed ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace
}  // namespace qlorapp::cuda
