// SPDX-License-Identifier: Apache-2.0
/// A CTA has one row, up to eight query heads that share a key head, and a part of the row's keys; its four warps take 16 keys in turn.
///
/// A second kernel joins the results of the CTAs that share a row.
#include <algorithm>
#include <cfloat>
#include <cstdint>
#include <limits>
#include <numbers>

#include "decode_attention.hpp"
#include "early_launch.cuh"
#include "head_sums.cuh"

namespace qlorapp::cuda {
namespace {

constexpr int kWarps = 4, kMostSplits = 256;
constexpr unsigned kAllLanes = 0xFFFFFFFFU;

template <class T, int kDim>
__global__ void __launch_bounds__(32 * kWarps) attend(const __grid_constant__ DecodeAttention work) {
  constexpr int kKeyLoads = kDim / 32, kValueLoads = kDim / 64;
  __shared__ float shared[kWarps * kHeads * kDim];
  __shared__ float shared_max[kWarps][kHeads], shared_sum[kWarps][kHeads];
  const int lane = static_cast<int>(threadIdx.x % 32U), warp = static_cast<int>(threadIdx.x / 32U);
  const int g = lane / 4, t = lane % 4;
  const int dim = static_cast<int>(work.head_dim);
  const int64_t row = blockIdx.z;
  const int group = static_cast<int>(work.heads / work.kv_heads), tiles = (group + kHeads - 1) / kHeads;
  const int kv_head = static_cast<int>(blockIdx.y) / tiles, first = (static_cast<int>(blockIdx.y) % tiles) * kHeads;
  const int heads = min(kHeads, group - first);
  const int64_t first_head = static_cast<int64_t>(kv_head) * group + first;
  wait_for_earlier_kernels();

  const auto length = static_cast<int>(__ldg(work.lengths + row)), splits = static_cast<int>(work.splits);
  const int from = work.window > 0 && length > work.window ? length - static_cast<int>(work.window) : 0;
  const int first_tile = from / kKeys * kKeys, share = (length - first_tile + splits - 1) / splits;
  const int chunk = (share + kKeys - 1) / kKeys * kKeys;
  const int begin = first_tile + static_cast<int>(blockIdx.x) * chunk, end = min(begin + chunk, length);
  const KeySlots slots(row, work.starts, work.shared_starts, work.shared_lengths);
  const T* const keys = static_cast<const T*>(work.k) + kv_head * work.kv_head_stride;
  const T* const values = static_cast<const T*>(work.v) + kv_head * work.kv_head_stride;
  const uint4 nothing = make_uint4(0, 0, 0, 0);

  uint4 q[kKeyLoads];
  const T* const own_q = static_cast<const T*>(work.q) + row * work.q_row_stride + (first_head + g) * work.q_head_stride;
#pragma unroll
  for (int j = 0; j < kKeyLoads; ++j) {
    const int at = j * 32 + t * 8;
    q[j] = g < heads && at < dim ? *reinterpret_cast<const uint4*>(own_q + at) : nothing;
  }

  const auto q_of = [&](int j) { return q[j]; };
  HeadSums<kDim> sums;
  const float scale = work.scale * std::numbers::log2e_v<float>;
  for (int base = begin + warp * kKeys; base < end; base += kWarps * kKeys) {
    attend_keys<T, kDim, false>(sums, q_of, keys, values, slots, work.slot_stride, from, base, end, dim, scale, g, t);
  }
  float sum = sums.sum;
  sum += __shfl_xor_sync(kAllLanes, sum, 1);
  sum += __shfl_xor_sync(kAllLanes, sum, 2);

  // Joined over the warps, in their order.
  if (t == 0) {
    shared_max[warp][g] = sums.most;
    shared_sum[warp][g] = sum;
  }
  __syncthreads();
  float all = -FLT_MAX, total = 0.0F;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) all = fmaxf(all, shared_max[w][g]);
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += shared_sum[w][g] * exp2f(shared_max[w][g] - all);
  const float own = exp2f(sums.most - all);
#pragma unroll
  for (int c = 0; c < kValueLoads; ++c)
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        shared[(warp * kHeads + g) * kDim + c * 64 + 16 * t + 8 * half + i] = sums.out[c][i][half] * own;
  __shared__ float totals[kHeads], largest_of[kHeads];
  if (warp == 0 && t == 0) totals[g] = total, largest_of[g] = all;
  __syncthreads();
  const auto joined = [&](int i) {
    const float* const from = shared + i / dim * kDim + i % dim;
    float value = from[0];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) value += from[w * kHeads * kDim];
    return value;
  };
  if (work.splits == 1) {
    T* const to = static_cast<T*>(work.out) + (row * work.heads + first_head) * dim;
    for (int i = static_cast<int>(threadIdx.x); i < heads * dim; i += 32 * kWarps)
      to[i] = from_float<T>(joined(i) / totals[i / dim]);
    return;
  }
  // [row][head][split]: the elements, then maximum and sum.
  const int64_t width = dim + 2;
  float* const parts = work.partial + ((row * work.heads + first_head) * work.splits + blockIdx.x) * width;
  for (int i = static_cast<int>(threadIdx.x); i < heads * dim; i += 32 * kWarps)
    parts[i / dim * work.splits * width + i % dim] = joined(i);
  if (static_cast<int>(threadIdx.x) < heads) {
    parts[threadIdx.x * work.splits * width + dim] = largest_of[threadIdx.x];
    parts[threadIdx.x * work.splits * width + dim + 1] = totals[threadIdx.x];
  }
}

/// A CTA has one head of one row.
template <class T>
__global__ void __launch_bounds__(256) join(const __grid_constant__ DecodeAttention work) {
  __shared__ float factors[kMostSplits];
  const int splits = static_cast<int>(work.splits), lane = static_cast<int>(threadIdx.x % 32U);
  const int64_t dim = work.head_dim, width = dim + 2, head = blockIdx.x, own = threadIdx.x;
  wait_for_earlier_kernels();
  const float* const parts = work.partial + head * work.splits * width;
  if (threadIdx.x < 32U) {
    float most = -FLT_MAX, sum = 0.0F;
    for (int s = lane; s < splits; s += 32) most = fmaxf(most, parts[s * width + dim]);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, step));
    for (int s = lane; s < splits; s += 32) {
      factors[s] = exp2f(parts[s * width + dim] - most);
      sum += parts[s * width + dim + 1] * factors[s];
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
    for (int s = lane; s < splits; s += 32) factors[s] /= sum;
  }
  __syncthreads();
  if (own >= dim) return;
  float value = 0.0F;
#pragma unroll 8
  for (int s = 0; s < splits; ++s) value += parts[s * width + own] * factors[s];
  static_cast<T*>(work.out)[head * dim + own] = from_float<T>(value);
}

template <class T, int kDim>
cudaError_t launch(const DecodeAttention& work, Stream stream) {
  const int64_t group = work.heads / work.kv_heads, tiles = (group + kHeads - 1) / kHeads;
  const dim3 grid(static_cast<unsigned>(work.splits), static_cast<unsigned>(work.kv_heads * tiles),
                  static_cast<unsigned>(work.rows));
  const cudaError_t error = launch_early<attend<T, kDim>>(grid, 32 * kWarps, 0, stream, work);
  if (error != cudaSuccess || work.splits == 1) return error;
  const auto threads = static_cast<unsigned>((work.head_dim + 31) / 32 * 32);
  return launch_early<join<T>>(dim3(static_cast<unsigned>(work.rows * work.heads)), threads, 0, stream, work);
}

template <class T>
cudaError_t launch_dim(const DecodeAttention& work, Stream stream) {
  if (work.head_dim <= 64) return launch<T, 64>(work, stream);
  if (work.head_dim <= 128) return launch<T, 128>(work, stream);
  return launch<T, 256>(work, stream);
}

}  // namespace

bool has_decode_attention(Float type, int64_t head_dim, int architecture) {
  if (head_dim < 8 || head_dim > 256 || head_dim % 8 != 0) return false;
  return (type == Float::kFloat16 && architecture >= 75) || (type == Float::kBFloat16 && architecture >= 80);
}

int64_t decode_splits(int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t longest, int multiprocessors) {
  const int64_t group = heads / kv_heads, pairs = rows * kv_heads * ((group + kHeads - 1) / kHeads);
  const int64_t at_a_time = (head_dim <= 64 ? 5 : head_dim <= 128 ? 3 : 2) * multiprocessors;  // CTAs; their registers decide
  // CTAs come in waves, and the last is seldom full. To begin and to join cost what so many keys cost, as measured on an H200.
  constexpr int64_t kBeginning = 130, kJoining = 200, kEach = kWarps * kKeys;
  int64_t best = 1, least = std::numeric_limits<int64_t>::max();
  for (int64_t splits = 1; splits <= std::min<int64_t>(kMostSplits, (longest + kEach - 1) / kEach); ++splits) {
    const int64_t waves = (pairs * splits + at_a_time - 1) / at_a_time, chunk = (longest + splits - 1) / splits;
    const int64_t cost = waves * (chunk + kBeginning) + (splits > 1 ? kJoining : 0);
    if (cost < least) best = splits, least = cost;
  }
  return best;
}

int64_t decode_partial_floats(const DecodeAttention& work) {
  return work.splits == 1 ? 0 : work.rows * work.heads * work.splits * (work.head_dim + 2);
}

cudaError_t decode_attention(const DecodeAttention& work, Stream stream) {
  if (work.rows == 0) return cudaSuccess;
  return work.type == Float::kFloat16 ? launch_dim<__half>(work, stream) : launch_dim<__nv_bfloat16>(work, stream);
}

}  // namespace qlorapp::cuda
