// SPDX-License-Identifier: Apache-2.0
/// Up to 8 rows of x times four-bit weights: what a warp does with a stage of 16 rows of W and 256 of k in shared memory. Shared by
/// gemm_4bit_few.cu and decode_pass.cu.
#pragma once

#include <cstdint>

#include "group_work.cuh"
#include "tensor_core.cuh"

namespace qlorapp::cuda {
namespace {

constexpr int kStage = 256, kStrip = 16, kFewTokens = 8;
constexpr int kStageCodes = kStrip * kStage / 2, kStageBytes = kStageCodes + 256;  // then scales
constexpr int kEntry = 256;  ///< Bytes from one byte's entry in a table to the next's.
constexpr int kWideTable = 256 * kEntry;
/// Shared memory of a CTA begins behind what the system keeps of it. A table is at kTable, so that a byte and a lane's own bank are an address by one
/// permutation; other things lie in front of it and behind it.
constexpr int kSystem = 1024, kTable = 65536, kInFront = kTable - kSystem;
static_assert(kTable % 65536 == 0);

/// Else entries would be read beside the table. @param shared  where dynamic shared memory begins.
__device__ __forceinline__ void require_place(const void* shared) {
  if (shared_address(shared) != static_cast<uint32_t>(kSystem)) __trap();
}
/// Where one of a word's bytes has its entry, of a lane whose bank begins so many bytes in it.
__device__ __forceinline__ uint32_t entry_of(uint32_t word, int byte, int lane_bytes) {
  return __byte_perm(word, static_cast<uint32_t>(kTable + lane_bytes), 0x7604U | static_cast<uint32_t>(byte << 4));
}

/// A block of 64 k: 16 rows of W, scaled, times 8 rows of x.
template <class T>
__device__ __forceinline__ void multiply_block(float (&sum)[4], const uint32_t (&a)[8], const uint32_t (&b)[8], uint4 low,
                                               uint4 high, float first_scale, float second_scale) {
  float part[4] = {};
  multiply<T>(part, a[0], b[0], a[1], b[1], low.x, low.y);
  multiply<T>(part, a[2], b[2], a[3], b[3], low.z, low.w);
  multiply<T>(part, a[4], b[4], a[5], b[5], high.x, high.y);
  multiply<T>(part, a[6], b[6], a[7], b[7], high.z, high.w);
  sum[0] += part[0] * first_scale;
  sum[1] += part[1] * first_scale;
  sum[2] += part[2] * second_scale;
  sum[3] += part[3] * second_scale;
}

/// Σ u·B of one element. @param u  written by other CTAs of this launch: not read by way of L1.  @param wide  u and b lie at whole 16 bytes.
template <class T>
__device__ __forceinline__ float low_rank_sum(const T* u, const T* b, int64_t rank, bool wide) {
  float sum = 0.0F;
  if (wide) {
    for (int64_t r = 0; r < rank; r += 8) {
      const uint4 words = __ldcg(reinterpret_cast<const uint4*>(u + r));
      T own_elements[8];
      memcpy(own_elements, &words, sizeof words);
      float of_b[8];
      load_eight(b + r, of_b);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += to_float(own_elements[i]) * of_b[i];
    }
  } else {
#pragma unroll 1
    for (int64_t r = 0; r < rank; ++r) {
      const unsigned short bits = __ldcg(reinterpret_cast<const unsigned short*>(u + r));
      T own;
      memcpy(&own, &bits, sizeof own);
      sum += to_float(own) * to_float(b[r]);
    }
  }
  return sum;
}

template <class T>
__device__ __forceinline__ void fill_wide(unsigned char* table, bool nf4) {
  const unsigned lane = threadIdx.x & 31U;
  const float entry = __ldg((nf4 ? kDeviceNf4 : kDeviceFp4).values + (lane & 15U));
  for (unsigned byte = threadIdx.x; byte < 256U; byte += blockDim.x) {
    const float first = __shfl_sync(kAllLanes, entry, static_cast<int>(byte >> 4U));
    const float second = __shfl_sync(kAllLanes, entry, static_cast<int>(byte & 15U));
    const uint32_t pair = pack_pair<T>(first, second);
#pragma unroll
    for (unsigned i = 0; i < 8; ++i)
      *reinterpret_cast<uint4*>(table + byte * kEntry + ((i + lane) & 7U) * 16U) = make_uint4(pair, pair, pair, pair);
  }
}
__device__ __forceinline__ void wide_pairs(uint2 codes, int lane, uint32_t (&pairs)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i)
    asm("ld.shared.b32 %0, [%1];" : "=r"(pairs[i]) : "r"(entry_of(i < 4 ? codes.x : codes.y, i % 4, lane * 4)));
}

/// Where a lane's 16 bytes of the first of four rows of codes go in a stage. Pieces of 32 bytes of a row are exchanged (by the row's last
/// bits) so that lanes which read together read different banks.
__device__ __forceinline__ int place_of_codes(int lane) {
  return lane / 8 * (kStage / 2) + ((lane % 8 / 2) ^ (lane / 8)) * 32 + (lane % 2) * 16;
}

/// The stage's x of a lane: of row g of x, of a block of 64 the 16 elements from 16·t on.
struct BlockInput {
  uint4 low, high;
};

/// sums += W·x of a stage. Of lane 4g + t the sums are the rows g and g + 8 of the strip, of the rows 2t and 2t + 1 of x.
/// @param x  x(i): block i, asked for in order, one before it is needed; the first is `first`.
/// @param offsets  of the nested scales of rows g and g + 8.
template <class T, class Input>
__device__ __forceinline__ void multiply_stage(float (&sums)[4], const unsigned char* stage, BlockInput first, const Input& x,
                                               const float* map, int lane, bool nested, const float (&offsets)[2]) {
  const int g = lane / 4, t = lane % 4;
  float scales[2][4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = half * 8 + g;
    if (nested) {  // four lanes share a row: each decodes the scale of one block
      const float outer = *reinterpret_cast<const float*>(stage + kStageCodes + 64 + row * 4);
      const float own = decode_scale_rn(map[stage[kStageCodes + row * 4 + t]], outer, offsets[half]);
#pragma unroll
      for (int i = 0; i < 4; ++i) scales[half][i] = __shfl_sync(kAllLanes, own, g * 4 + i);
    } else {
      const float4 all = *reinterpret_cast<const float4*>(stage + kStageCodes + row * 16);
      scales[half][0] = all.x, scales[half][1] = all.y, scales[half][2] = all.z, scales[half][3] = all.w;
    }
  }
  BlockInput here = first;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    BlockInput after{};
    if (i < 3) after = x(i + 1);
    uint32_t a[8], b[8];
    const unsigned char* const place = stage + g * (kStage / 2) + (i ^ (g & 3)) * 32 + t * 8;
    wide_pairs(*reinterpret_cast<const uint2*>(place), lane, a);
    wide_pairs(*reinterpret_cast<const uint2*>(place + 8 * (kStage / 2)), lane, b);
    multiply_block<T>(sums, a, b, here.low, here.high, scales[0][i], scales[1][i]);
    here = after;
  }
}

}  // namespace
}  // namespace qlorapp::cuda
