// SPDX-License-Identifier: Apache-2.0
/// Attention of up to eight query heads that share a key head over 16 keys, by a warp. Shared by decode_attention.cu and decode_pass.cu.
///
/// Both products are the tensor cores' 16×8×16 with the heads as rows (eight of the 16 are idle: memory decides here). Which 16 of a head's
/// elements a product adds up is the lanes' choice, so a lane reads 16 bytes of a key at a time, straight into its operand registers. Of the
/// values a lane reads eight neighbors of four keys and pairs them up itself.
///
/// The softmax is formed as keys pass by (its maximum and sum are corrected), in fp32; probabilities are rounded to 16 bits for the second
/// product, as flash attention does.
#pragma once

#include <cfloat>
#include <cstdint>

#include "element.cuh"
#include "tensor_core.cuh"

namespace qlorapp::cuda {
namespace {

constexpr int kHeads = 8, kKeys = 16;

/// Of each row the groups of up to kHeads query heads that share a key head.
inline int64_t pairs_of(int64_t rows, int64_t heads, int64_t kv_heads) {
  return rows * kv_heads * ((heads / kv_heads + kHeads - 1) / kHeads);
}

/// The eight heads' rows of a product; the other eight are zero, in and out.
template <class T>
__device__ __forceinline__ void multiply_heads(float (&sum)[2], uint32_t a0, uint32_t a2, uint32_t b0, uint32_t b1) {
  float all[4] = {sum[0], sum[1], 0.0F, 0.0F};
  multiply<T>(all, a0, 0U, a2, 0U, b0, b1);
  sum[0] = all[0];
  sum[1] = all[1];
}

/// 16 bytes that an earlier part of the same launch may have written. Of a head's 256 bytes the rest follows into the L2 cache: fewer, longer reads.
template <class T>
__device__ __forceinline__ uint4 read_past_l1(const T* address) {
  uint4 v;
#if __CUDA_ARCH__ >= 800
  asm volatile("ld.global.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
#else
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
#endif
  return v;
}

/// Where a row's keys are, whose shared ones are a multiple of kKeys: a tile of keys that begins at such a multiple lies in one place. Slots are
/// fewer than 2^31.
struct KeySlots {
  int start, shared_start = 0, shared = 0;

  /// @param starts, shared_starts, shared_lengths  of all rows; the last two may be null.
  __device__ KeySlots(int64_t row, const int64_t* starts, const int64_t* shared_starts, const int64_t* shared_lengths)
      : start(static_cast<int>(__ldg(starts + row))) {
    if (shared_lengths == nullptr) return;
    shared = static_cast<int>(__ldg(shared_lengths + row)), shared_start = static_cast<int>(__ldg(shared_starts + row));
  }
  [[nodiscard]] __device__ __forceinline__ int64_t slot(int key) const { return key + (key < shared ? shared_start : start); }
};

/// Sums over the keys that a warp has read. Lane 4g + t holds elements 64c + 16t + i (out[c][i][0]) and 64c + 16t + 8 + i (out[c][i][1]) of head g.
template <int kDim>
struct HeadSums {
  float out[kDim / 64][8][2] = {};
  float most = -FLT_MAX, sum = 0.0F;  ///< Of head g; the sum is this lane's part.
};

/// Adds keys from the larger of `base`, a multiple of 16, and `from` to the smaller of base + 15 and `end` - 1.
/// @param q      q(j): the elements 32j + 8t and seven more of head g.  @param scale  times log2(e).
/// @param key    key(tile, j): the same of the key base + 8 · tile + g.
/// @param value  value(c, i): the elements 64c + 8g and seven more of the key base + 8 · (i / 2) + 2t + i % 2. After before_values().
template <class T, int kDim, class Query, class Key, class Before, class Value>
__device__ __forceinline__ void add_keys(HeadSums<kDim>& sums, const Query& q, const Key& key, const Before& before_values,
                                         const Value& value, int from, int base, int end, float scale, int t) {
  constexpr unsigned kAllLanes = 0xFFFFFFFFU;
  constexpr int kKeyLoads = kDim / 32, kValueLoads = kDim / 64;
  const auto is_seen = [&](int tile, int i) {
    const int at = base + tile * 8 + 2 * t + i;
    return at >= from && at < end;
  };
  float score[2][2] = {};  // of head g: keys tile · 8 + 2t and the next
#pragma unroll
  for (int tile = 0; tile < 2; ++tile)
#pragma unroll
    for (int j = 0; j < kKeyLoads; ++j) {
      const uint4 own = q(j), other = key(tile, j);
      multiply_heads<T>(score[tile], own.x, own.y, other.x, other.y);
      multiply_heads<T>(score[tile], own.z, own.w, other.z, other.w);
    }
  float largest = sums.most;
#pragma unroll
  for (int tile = 0; tile < 2; ++tile)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      score[tile][i] = is_seen(tile, i) ? score[tile][i] * scale : -FLT_MAX;
      largest = fmaxf(largest, score[tile][i]);
    }
  largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 1));
  largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 2));
  const float correction = exp2f(sums.most - largest);
  sums.most = largest;
  sums.sum *= correction;
#pragma unroll
  for (int tile = 0; tile < 2; ++tile)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      score[tile][i] = is_seen(tile, i) ? exp2f(score[tile][i] - sums.most) : 0.0F;
      sums.sum += score[tile][i];
    }
  before_values();
  const uint32_t p0 = pack_pair<T>(score[0][0], score[0][1]), p1 = pack_pair<T>(score[1][0], score[1][1]);
#pragma unroll
  for (int c = 0; c < kValueLoads; ++c) {
    const uint4 v[4] = {value(c, 0), value(c, 1), value(c, 2), value(c, 3)};
    const uint32_t words[4][4] = {{v[0].x, v[0].y, v[0].z, v[0].w},
                                  {v[1].x, v[1].y, v[1].z, v[1].w},
                                  {v[2].x, v[2].y, v[2].z, v[2].w},
                                  {v[3].x, v[3].y, v[3].z, v[3].w}};
#pragma unroll
    for (int i = 0; i < 8; ++i) {  // element i of each lane's eight
      const unsigned select = i % 2 == 0 ? 0x5410U : 0x7632U;
      sums.out[c][i][0] *= correction;
      sums.out[c][i][1] *= correction;
      multiply_heads<T>(sums.out[c][i], p0, p1, __byte_perm(words[0][i / 2], words[1][i / 2], select),
                        __byte_perm(words[2][i / 2], words[3][i / 2], select));
    }
  }
}

/// add_keys() of keys and values in memory.
/// @param keys, values  of slot 0.  @param slots  of a row's keys.
/// @tparam kFewRegisters  reads values when the scores are there, not with the keys.
template <class T, int kDim, bool kFewRegisters, class Query>
__device__ __forceinline__ void attend_keys(HeadSums<kDim>& sums, const Query& q, const T* keys, const T* values,
                                            const KeySlots& slots, int64_t slot_stride, int from, int base, int end, int dim,
                                            float scale, int g, int t) {
  constexpr int kKeyLoads = kDim / 32, kValueLoads = kDim / 64;
  const uint4 nothing = make_uint4(0, 0, 0, 0);
  const int64_t tile_start = slots.slot(base) * slot_stride;
  keys += tile_start, values += tile_start;
  const int last = min(kKeys, end - base) - 1;
  constexpr bool kOneByOne = kFewRegisters && kDim > 128;  // of the values' loads
  uint4 k[2][kKeyLoads], v[kValueLoads][4];
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    const int key = min(tile * 8 + g, last);
#pragma unroll
    for (int j = 0; j < kKeyLoads; ++j) {
      const int at = j * 32 + t * 8;
      k[tile][j] = at < dim ? read_past_l1(keys + key * slot_stride + at) : nothing;
    }
  }
  const auto read_value = [&](int c, int i) {
    const int key = min((i / 2) * 8 + 2 * t + i % 2, last);
    const int at = c * 64 + g * 8;
    return at < dim ? read_past_l1(values + key * slot_stride + at) : nothing;
  };
  const auto read_values = [&] {
#pragma unroll
    for (int c = 0; c < kValueLoads; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i) v[c][i] = read_value(c, i);
  };
  if constexpr (!kFewRegisters) read_values();
  add_keys<T>(
      sums, q, [&](int tile, int j) { return k[tile][j]; },
      [&] {
        if constexpr (kFewRegisters && !kOneByOne) read_values();
      },
      [&](int c, int i) {
        if constexpr (kOneByOne) return read_value(c, i);
        else return v[c][i];
      },
      from, base, end, scale, t);
}

}  // namespace
}  // namespace qlorapp::cuda
