// SPDX-License-Identifier: Apache-2.0
/// The kernels before and after that of gemm_4bit_wide.cu, and how its work is divided.
#pragma once

#include <cstdint>
#include <type_traits>

#include "group_work.cuh"
#include "tensor_core.cuh"

namespace qlorapp::cuda {
namespace {

constexpr int kHeight = 256, kUnit = 256;  // of a CTA: rows of W; k whose scales are read at a time
constexpr int kFinished = 4;               ///< Rows of x of a CTA of finish_wide().

/// Strips, and all k of them, in units.
struct Extent {
  uint32_t units, strips, total, ctas;

  __host__ __device__ Extent(const Work& work, unsigned most_ctas)
      : units(static_cast<uint32_t>(work.asked.k / kUnit)),
        strips(static_cast<uint32_t>(work.first_strip[work.asked.count])),
        total(units * strips),
        ctas(most_ctas < total ? most_ctas : total) {}
  [[nodiscard]] __host__ __device__ uint32_t first_of(uint32_t cta) const { return total * cta / ctas; }
  [[nodiscard]] __host__ __device__ uint32_t cta_of(uint32_t unit) const { return ((unit + 1) * ctas - 1) / total; }
  /// Of a strip: the first CTA that has a part, and how many have one.
  [[nodiscard]] __host__ __device__ uint32_t first_part(uint32_t strip) const { return cta_of(strip * units); }
  [[nodiscard]] __host__ __device__ uint32_t parts(uint32_t strip) const {
    return cta_of((strip + 1) * units - 1) - first_part(strip) + 1;
  }
};

/// Bytes of x as lay_x() leaves it.
__host__ __device__ int64_t laid_bytes(int tokens, int64_t k) { return tokens * k * 2; }
constexpr int kBesideThreads = 1024, kTileTokens = 16, kTileRanks = 8;  // of a CTA of what comes before the product

/// CTAs that form u.
__host__ __device__ inline int64_t tiles_of_u(const Work& work) {
  return (work.asked.m + kTileTokens - 1) / kTileTokens * ((work.asked.ranks + kTileRanks - 1) / kTileRanks);
}

/// Asks for the rows of A of a tile of u; tiles of other rows of x read the same.
__device__ __forceinline__ void prefetch_a(const Work& work, int tile) {
  const int64_t rank0 = int64_t{tile} * kTileRanks, ranks = min(int64_t{kTileRanks}, work.asked.ranks - rank0);
  const auto* const a = static_cast<const unsigned char*>(work.asked.a) + rank0 * work.asked.k * 2;
  for (int64_t at = threadIdx.x * kLine; at < ranks * work.asked.k * 2; at += kBesideThreads * kLine) prefetch(a + at);
}

/// u = x·Aᵀ, 16 rows of 8 columns of it. The warps divide k among themselves.
template <class T>
__device__ __forceinline__ void form_u(const Work& work, int tile) {
  __shared__ float sums[kBesideThreads / 32][kTileTokens * kTileRanks];
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
  const auto rank_tiles = static_cast<int>((work.asked.ranks + kTileRanks - 1) / kTileRanks);
  const int64_t token0 = tile / rank_tiles * kTileTokens, rank0 = tile % rank_tiles * kTileRanks;
  const auto* const x = static_cast<const unsigned char*>(work.asked.x) + t * 32;
  const unsigned char* const low = x + min(token0 + g, work.asked.m - 1) * work.asked.x_stride * 2;
  const unsigned char* const high = x + min(token0 + g + 8, work.asked.m - 1) * work.asked.x_stride * 2;
  const unsigned char* const a =
      static_cast<const unsigned char*>(work.asked.a) + min(rank0 + g, work.asked.ranks - 1) * work.asked.k * 2 + t * 32;
  float sum[4] = {};
#pragma unroll 2
  for (int64_t block = warp; block < work.asked.k / kBlock; block += kBesideThreads / 32) {
    const auto words_at = [&](const unsigned char* row, int half) {
      return *reinterpret_cast<const uint4*>(row + block * (kBlock * 2) + half * 16);
    };
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 first = words_at(low, half), second = words_at(high, half), of_a = words_at(a, half);
      multiply<T>(sum, first.x, second.x, first.y, second.y, of_a.x, of_a.y);
      multiply<T>(sum, first.z, second.z, first.w, second.w, of_a.z, of_a.w);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[warp][(g + i / 2 * 8) * kTileRanks + t * 2 + i % 2] = sum[i];
  __syncthreads();
  if (thread >= kTileTokens * kTileRanks) return;
  float all = 0.0F;
#pragma unroll
  for (int w = 0; w < kBesideThreads / 32; ++w) all += sums[w][thread];
  const int64_t token = token0 + thread / kTileRanks, rank = rank0 + thread % kTileRanks;
  if (token < work.asked.m && rank < work.asked.ranks)
    static_cast<T*>(work.asked.u)[token * work.asked.ranks + rank] = from_float<T>(all);
}

/// 16 bytes of x as stages take it: of kTokens rows, of 64 k, a Wide::kTile in the order of k in which W is multiplied. Rows that x has not are 0.
template <int kTokens>
__device__ __forceinline__ void lay_x(const Work& work, int64_t at) {
  const int64_t block = at / (kTokens * 8);
  const int in_tile = static_cast<int>(at % (kTokens * 8)), row = in_tile / 8, piece = (in_tile % 8) ^ (row % 8);
  if (at >= laid_bytes(kTokens, work.asked.k) / 16) return;
  uint4 words = make_uint4(0, 0, 0, 0);
  if (row < work.asked.m) {
    const auto* const from = reinterpret_cast<const uint32_t*>(static_cast<const unsigned char*>(work.asked.x) +
                                                               (row * work.asked.x_stride + block * kBlock) * 2) +
                             piece;
    words = make_uint4(from[0], from[8], from[16], from[24]);
  }
  reinterpret_cast<uint4*>(work.laid)[at] = words;
}

/// The first CTAs form u, the others lay x down for the product.
template <class T, int kTokens>
__global__ void __launch_bounds__(kBesideThreads) prepare_wide(const __grid_constant__ Work work) {
  const int64_t of_u = tiles_of_u(work);
  if (blockIdx.x < of_u) prefetch_a(work, static_cast<int>(blockIdx.x));
  wait_for_earlier_kernels();
  if (blockIdx.x < of_u) form_u<T>(work, static_cast<int>(blockIdx.x));
  else lay_x<kTokens>(work, (blockIdx.x - of_u) * kBesideThreads + threadIdx.x);
}

/// Four columns of a row of x, of which the first is a multiple of four, as lay_x() lays them.
template <int kTokens>
__device__ __forceinline__ void lay_four(unsigned char* laid, int row, int column, uint2 words) {
  const int word = column % kBlock / 2, piece = word % 8;
  auto* const tile = reinterpret_cast<uint32_t*>(laid) + (column / kBlock * kTokens + row) * (kBlock / 2) + word / 8;
  tile[(piece ^ (row % 8)) * 4] = words.x;
  tile[((piece + 1) ^ (row % 8)) * 4] = words.y;
}

/// y = Σ partial + bias. A CTA has a strip and four rows of x, a thread four rows of W.
template <class T, int kTokens>
__global__ void __launch_bounds__(kHeight) finish_wide(const __grid_constant__ Work work) {
  constexpr int kAtOnce = kTokens <= 64 ? 10 : 4;  // loads that nothing waits for
  const Extent extent(work, static_cast<unsigned>(work.splits));
  const int own = weight_of(work, blockIdx.x);
  const auto row = (blockIdx.x - static_cast<uint32_t>(work.first_strip[own])) * kHeight + threadIdx.x % 64U * 4U;
  const uint32_t token = blockIdx.y * kFinished + threadIdx.x / 64U, column = static_cast<uint32_t>(work.first_row[own]) + row;
  const auto width = static_cast<uint32_t>(work.first_row[work.asked.count]), m = static_cast<uint32_t>(work.asked.m);
  const int rows = static_cast<int>(work.asked.weights[own].n) - static_cast<int>(row);
  wait_for_earlier_kernels();
  if (token >= m || rows <= 0) return;
  const auto parts = static_cast<int>(extent.parts(blockIdx.x));
  const float* from = work.asked.partial + static_cast<int64_t>(token) * width + column;
  const int64_t part_floats = static_cast<int64_t>(m) * width;
  const bool is_whole = rows >= 4 && (width | column) % 4U == 0U;
  float sums[4] = {};
  for (int part = 0; part < parts; part += kAtOnce, from += kAtOnce * part_floats) {
    float4 found[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float* const at = from + i * part_floats;
      found[i] = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
      if (part + i >= parts) continue;
      if (is_whole) {
        found[i] = *reinterpret_cast<const float4*>(at);
      } else {
        found[i].x = at[0];
        if (rows > 1) found[i].y = at[1];
        if (rows > 2) found[i].z = at[2];
        if (rows > 3) found[i].w = at[3];
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) sums[0] += found[i].x, sums[1] += found[i].y, sums[2] += found[i].z, sums[3] += found[i].w;
  }
  T* const y = static_cast<T*>(work.asked.y) + token * work.asked.y_stride + column;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i >= rows) break;
    const float bias = work.asked.bias == nullptr ? 0.0F : to_float(static_cast<const T*>(work.asked.bias)[column + i]);
    y[i] = from_float<T>(sums[i] + bias);
  }
}
template <class T, int kTokens>
cudaError_t launch_finish(const Work& work, Stream stream) {
  const dim3 grid(static_cast<unsigned>(work.first_strip[work.asked.count]),
                  static_cast<unsigned>((work.asked.m + kFinished - 1) / kFinished));
  return launch_early<finish_wide<T, kTokens>>(grid, kHeight, 0, stream, work);
}

/// Rows of x that the kernels are compiled for.
inline int tokens_of(int64_t m) { return m <= 16 ? 16 : m <= 32 ? 32 : m <= 64 ? 64 : 128; }
template <class F>
cudaError_t with_tokens(int64_t m, const F& run) {
  switch (tokens_of(m)) {
    case 16:
      return run(std::integral_constant<int, 16>());
    case 32:
      return run(std::integral_constant<int, 32>());
    case 64:
      return run(std::integral_constant<int, 64>());
    default:
      return run(std::integral_constant<int, 128>());
  }
}

}  // namespace
}  // namespace qlorapp::cuda
