// SPDX-License-Identifier: Apache-2.0
/// For wide_pass.cu: the kernels behind products, which add up their parts and do what follows.
#pragma once

#include <cstdint>

#include "pass_formulas.cuh"
#include "wide_beside.cuh"

namespace qlorapp::cuda {
namespace {

constexpr int kEndThreads = 256, kMostThreads = 1024, kFour = 4;  // columns of a thread at a time

/// Where the sums of a product's parts lie.
struct Sums {
  const float* partial = nullptr;
  const void* bias = nullptr;
  uint32_t part_floats = 0, width = 0;  ///< Of all rows; of one.
  Extent extent;
  uint32_t first_strip[GemmFourBitGroup::kMostWeights] = {}, first_row[GemmFourBitGroup::kMostWeights] = {};
  int count = 0;

  explicit Sums(const Work& work)
      : partial(work.asked.partial),
        bias(work.asked.bias),
        part_floats(static_cast<uint32_t>(work.asked.m * work.first_row[work.asked.count])),
        width(static_cast<uint32_t>(work.first_row[work.asked.count])),
        extent(work, static_cast<unsigned>(work.splits)),
        count(work.asked.count) {
    for (int i = 0; i < count; ++i)
      first_strip[i] = static_cast<uint32_t>(work.first_strip[i]), first_row[i] = static_cast<uint32_t>(work.first_row[i]);
  }
};

/// Four columns of a product: how many parts they have, and their bias. Reads nothing that a kernel before wrote.
struct Columns {
  int parts = 0;
  const float* from = nullptr;  ///< Of the first row.
  uint2 bias = {};

  Columns() = default;
  __device__ __forceinline__ Columns(const Sums& sums, int own, uint32_t row) {
    const uint32_t strip = sums.first_strip[own] + row / kHeight, column = sums.first_row[own] + row;
    parts = static_cast<int>(sums.extent.parts(strip));
    from = sums.partial + column;
    if (sums.bias != nullptr) bias = __ldg(reinterpret_cast<const uint2*>(static_cast<const T*>(sums.bias) + column));
  }
};

__device__ __forceinline__ void unpack_four(uint2 words, float (&v)[kFour]) {
  v[0] = __uint_as_float(words.x << 16), v[1] = __uint_as_float(words.x & 0xFFFF'0000U);
  v[2] = __uint_as_float(words.y << 16), v[3] = __uint_as_float(words.y & 0xFFFF'0000U);
}
__device__ __forceinline__ uint2 words_of(const float (&v)[kFour]) {
  return make_uint2(pack_pair<T>(v[0], v[1]), pack_pair<T>(v[2], v[3]));
}
__device__ __forceinline__ uint2 words_at(const void* from, int64_t at) {
  return *reinterpret_cast<const uint2*>(static_cast<const T*>(from) + at);
}
__device__ __forceinline__ void store_four(void* to, int64_t at, const float (&v)[kFour]) {
  *reinterpret_cast<uint2*>(static_cast<T*>(to) + at) = words_of(v);
}

/// Four results of a product, rounded, of kSets places.
template <int kAtOnce, int kSets>
__device__ __forceinline__ void add_parts(const Sums& sums, const Columns (&columns)[kSets], int token, float (&v)[kSets][kFour]) {
  const float* from[kSets];
  float4 sum[kSets];
  int most = 0;
#pragma unroll
  for (int set = 0; set < kSets; ++set) {
    from[set] = columns[set].from + static_cast<uint32_t>(token) * sums.width;
    sum[set] = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
    most = max(most, columns[set].parts);
  }
#pragma unroll 1
  for (int part = 0; part < most; part += kAtOnce) {
    float4 found[kSets][kAtOnce];  // loads that nothing waits for: the last part stands for those that there are not
#pragma unroll
    for (int set = 0; set < kSets; ++set)
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const auto which = static_cast<uint32_t>(min(part + i, columns[set].parts - 1));
        found[set][i] = *reinterpret_cast<const float4*>(from[set] + which * sums.part_floats);
      }
#pragma unroll
    for (int set = 0; set < kSets; ++set)
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float4 one = found[set][i];
        if (part + i < columns[set].parts) sum[set].x += one.x, sum[set].y += one.y, sum[set].z += one.z, sum[set].w += one.w;
      }
  }
#pragma unroll
  for (int set = 0; set < kSets; ++set) {
    unpack_four(columns[set].bias, v[set]);
    v[set][0] = rounded<T>(sum[set].x + v[set][0]), v[set][1] = rounded<T>(sum[set].y + v[set][1]);
    v[set][2] = rounded<T>(sum[set].z + v[set][2]), v[set][3] = rounded<T>(sum[set].w + v[set][3]);
  }
}

struct Gated {
  Sums sums;
  void* h;
  unsigned char* next;  ///< Where what is written is laid for the product that reads it.
  int m, width;
  Activation activation;
};

/// h = act(gate) · up, rows of which x has none 0.
template <int kTokens>
__global__ void __launch_bounds__(kEndThreads, 4) end_gated(const __grid_constant__ Gated end) {
  const auto column = static_cast<int>((blockIdx.x * kEndThreads + threadIdx.x) * kFour), token = static_cast<int>(blockIdx.y);
  if (column >= end.width) return;
  const auto row = static_cast<uint32_t>(column);
  const Columns columns[2] = {Columns(end.sums, 0, row), Columns(end.sums, 1, row)};
  wait_for_earlier_kernels();
  float h[kFour] = {};
  if (token < end.m) {
    float of[2][kFour];
    add_parts<4>(end.sums, columns, token, of);
#pragma unroll
    for (int i = 0; i < kFour; ++i) h[i] = activated(end.activation, of[0][i], of[1][i]);
    store_four(end.h, static_cast<int64_t>(token) * end.width + column, h);
  }
  lay_four<kTokens>(end.next, token, column, words_of(h));
}

struct OfHeads {
  Sums sums;
  HeadRule rule;
  void *y, *keys, *values;
  const void *q_norm, *k_norm;
  const int64_t *positions, *slots;
  int m, heads, kv_heads;
};

/// Heads of a product of queries, keys and values: a warp each. Queries go to y, the others to the cache.
template <int kDim>
__global__ void __launch_bounds__(kEndThreads, 4) end_in_heads(const __grid_constant__ OfHeads end) {
  __shared__ __align__(16) float all_scratch[kEndThreads / 32][kDim];
  const int all = end.heads + 2 * end.kv_heads, dim = end.rule.dim, lane = static_cast<int>(threadIdx.x % 32U);
  const auto warp = static_cast<int>(threadIdx.x / 32U), unit = static_cast<int>(blockIdx.x) * (kEndThreads / 32) + warp;
  const int token = unit / all, head = unit % all, kv_head = head - end.heads;
  float* const scratch = all_scratch[warp];
  if (token >= end.m) return;
  const auto first = static_cast<uint32_t>(head * dim);
  int own = 0;
#pragma unroll
  for (int next = 1; next < GemmFourBitGroup::kMostWeights; ++next)
    own += next < end.sums.count && first >= end.sums.first_row[next] ? 1 : 0;
  const int64_t position = end.positions[token], slot = end.slots[token];
  constexpr int kTimes = (kDim + 127) / 128;
  const auto column_of = [&](int i) { return i * 128 + lane * kFour; };
  const auto columns_of = [&](int i) {
    return Columns(end.sums, own, first - end.sums.first_row[own] + static_cast<uint32_t>(min(column_of(i), dim - kFour)));
  };
  const Columns columns[2] = {columns_of(0), columns_of(kTimes - 1)};
  wait_for_earlier_kernels();
#pragma unroll
  for (int i = 0; i < kTimes; ++i) {
    if (column_of(i) >= dim) break;
    const Columns one[1] = {columns[i]};
    float v[1][kFour];
    add_parts<8>(end.sums, one, token, v);
    *reinterpret_cast<float4*>(scratch + column_of(i)) = make_float4(v[0][0], v[0][1], v[0][2], v[0][3]);
  }
  __syncwarp();
  const auto of_cache = [&](void* cache, int which) { return static_cast<T*>(cache) + (slot * end.kv_heads + which) * dim; };
  if (kv_head >= end.kv_heads) {
    T* const to = of_cache(end.values, kv_head - end.kv_heads);
    for (int i = lane; i < dim; i += 32) to[i] = from_float<T>(scratch[i]);
    return;
  }
  T* const to =
      kv_head < 0 ? static_cast<T*>(end.y) + static_cast<int64_t>(token) * end.sums.width + first : of_cache(end.keys, kv_head);
  prepare_head_of<kDim>(
      end.rule, lane, [&](int i) { return scratch[i]; }, kv_head < 0 ? end.q_norm : end.k_norm, position, scratch, to);
}

struct InStream {
  Sums sums;
  const void* x;  ///< Read where there are no sums; null: nothing is added.
  void* stream;
  const void *norm, *next_norm;
  void* next_x;
  unsigned char* next;  ///< Where what is written is laid for the product that reads it.
  int m, width;
  float eps, factor;
  NormRule rule;
};

/// stream += factor · result, normed where there is a norm of it; then its own norm. A CTA a row, whose threads have kTimes times four columns.
template <int kTokens, int kTimes>
__global__ void __launch_bounds__(kMostThreads, 1) end_in_stream(const __grid_constant__ InStream end) {
  const auto token = static_cast<int>(blockIdx.x);
  const int64_t first = static_cast<int64_t>(token) * end.width;
  const auto each = [&](const auto& run) {
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
      const auto column = static_cast<int>(threadIdx.x + i * blockDim.x) * kFour;
      if (column < end.width) run(i, column);
    }
  };
  const auto norm = [&](float(&v)[kTimes][kFour], const uint2(&weights)[kTimes]) {
    float squares = 0.0F;
    each([&](int i, int) {
#pragma unroll
      for (const float one : v[i]) squares = fmaf(one, one, squares);
    });
    const float mean = __fdiv_rn(across_block<Sum>(squares, 0.0F), static_cast<float>(end.width));
    const float rstd = __frcp_rn(__fsqrt_rn(__fadd_rn(mean, end.eps)));
    each([&](int i, int) {
      float weight[kFour];
      unpack_four(weights[i], weight);
#pragma unroll
      for (int j = 0; j < kFour; ++j) v[i][j] = normed_by(end.rule, v[i][j] * rstd, weight[j]);
    });
  };
  // These loads do not depend on the product in front, so they begin before it has ended.
  const bool has_sums = end.sums.partial != nullptr, adds = has_sums || end.x != nullptr;
  uint2 weights[kTimes], next_weights[kTimes];
  Columns columns[kTimes];
  each([&](int i, int column) {
    if (has_sums) columns[i] = Columns(end.sums, 0, static_cast<uint32_t>(column));
    if (end.norm != nullptr) weights[i] = words_at(end.norm, column);
    if (end.next_norm != nullptr) next_weights[i] = words_at(end.next_norm, column);
  });
  wait_for_earlier_kernels();
  if (token >= end.m) {  // rows that x has not are 0
    each([&](int, int column) { lay_four<kTokens>(end.next, token, column, make_uint2(0, 0)); });
    return;
  }
  uint2 before[kTimes];
  float added[kTimes][kFour] = {};
  each([&](int i, int column) {
    before[i] = words_at(end.stream, first + column);
    if (has_sums) {
      const Columns one[1] = {columns[i]};
      float v[1][kFour];
      add_parts<kTokens <= 64 ? 10 : 5>(end.sums, one, token, v);
#pragma unroll
      for (int j = 0; j < kFour; ++j) added[i][j] = v[0][j];
    } else if (adds) unpack_four(words_at(end.x, first + column), added[i]);
  });
  if (end.norm != nullptr) norm(added, weights);
  each([&](int i, int column) {
    float stream[kFour];
    unpack_four(before[i], stream);
#pragma unroll
    for (int j = 0; j < kFour; ++j) {
      const float value = end.factor == 1.0F ? added[i][j] : rounded<T>(added[i][j] * end.factor);
      added[i][j] = adds ? rounded<T>(stream[j] + value) : stream[j];
    }
    if (adds) store_four(end.stream, first + column, added[i]);
  });
  if (end.next_x == nullptr) return;
  if (end.next_norm != nullptr) norm(added, next_weights);
  each([&](int i, int column) {
    store_four(end.next_x, first + column, added[i]);
    lay_four<kTokens>(end.next, token, column, words_of(added[i]));
  });
}

}  // namespace
}  // namespace qlorapp::cuda
