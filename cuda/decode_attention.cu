// SPDX-License-Identifier: Apache-2.0
/// A CTA has one row, up to eight query heads that share a key head, and a part of the row's keys; its four warps take 16 keys in turn.
///
/// Both products are the tensor cores' 16×8×16 with the heads as rows (eight of the 16 are idle: memory decides here). Which 16 of a head's
/// elements a product adds up is the lanes' choice, so a lane reads 16 bytes of a key at a time straight into its operand registers. Of the
/// values a lane reads eight neighbors of four keys and pairs them up itself. No element passes through shared memory.
///
/// The softmax is formed as keys pass by (its maximum and sum are corrected), in fp32; probabilities are rounded to 16 bits for the second
/// product, as flash attention does. What several CTAs found of a row is joined by a second kernel.
#include <algorithm>
#include <cfloat>
#include <cstdint>

#include "decode_attention.hpp"
#include "early_launch.cuh"
#include "element.cuh"
#include "tensor_core.cuh"

namespace qlorapp::cuda {
namespace {

constexpr int kWarps = 4, kHeads = 8, kKeys = 16, kMostSplits = 256;
constexpr unsigned kAllLanes = 0xFFFFFFFFU;
constexpr float kLog2E = 1.4426950408889634F;

/// The eight heads' rows of a product; the other eight are zero, in and out.
template <class T>
__device__ __forceinline__ void multiply_heads(float (&sum)[2], uint32_t a0, uint32_t a2, uint32_t b0, uint32_t b1) {
  float all[4] = {sum[0], sum[1], 0.0F, 0.0F};
  multiply<T>(all, a0, 0U, a2, 0U, b0, b1);
  sum[0] = all[0];
  sum[1] = all[1];
}

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

  const int64_t length = __ldg(work.lengths + row);
  const int64_t from = work.window > 0 && length > work.window ? length - work.window : 0;
  const int64_t share = (length - from + work.splits - 1) / work.splits, chunk = (share + kKeys - 1) / kKeys * kKeys;
  const int64_t begin = from + static_cast<int64_t>(blockIdx.x) * chunk, end = min(begin + chunk, length);
  const int64_t slot = __ldg(work.starts + row);
  const T* const keys = static_cast<const T*>(work.k) + slot * work.slot_stride + kv_head * work.kv_head_stride;
  const T* const values = static_cast<const T*>(work.v) + slot * work.slot_stride + kv_head * work.kv_head_stride;
  const uint4 nothing = make_uint4(0, 0, 0, 0);

  uint4 q[kKeyLoads];
  const T* const own_q = static_cast<const T*>(work.q) + row * work.q_row_stride + (first_head + g) * work.q_head_stride;
#pragma unroll
  for (int j = 0; j < kKeyLoads; ++j) {
    const int at = j * 32 + t * 8;
    q[j] = g < heads && at < dim ? *reinterpret_cast<const uint4*>(own_q + at) : nothing;
  }

  float out[kValueLoads][8][2] = {};
  float most = -FLT_MAX, sum = 0.0F;  // of head g; the sum is this lane's part
  const float scale = work.scale * kLog2E;
  for (int64_t base = begin + warp * kKeys; base < end; base += kWarps * kKeys) {
    uint4 k[2][kKeyLoads], v[4][kValueLoads];
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const int64_t key = min(base + tile * 8 + g, end - 1);
#pragma unroll
      for (int j = 0; j < kKeyLoads; ++j) {
        const int at = j * 32 + t * 8;
        k[tile][j] = at < dim ? read_once(reinterpret_cast<const uint4*>(keys + key * work.slot_stride + at)) : nothing;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t key = min(base + (i / 2) * 8 + 2 * t + i % 2, end - 1);
#pragma unroll
      for (int c = 0; c < kValueLoads; ++c) {
        const int at = c * 64 + g * 8;
        v[i][c] = at < dim ? read_once(reinterpret_cast<const uint4*>(values + key * work.slot_stride + at)) : nothing;
      }
    }
    float score[2][2] = {};  // of head g: keys tile · 8 + 2t and the next
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
      for (int j = 0; j < kKeyLoads; ++j) {
        multiply_heads<T>(score[tile], q[j].x, q[j].y, k[tile][j].x, k[tile][j].y);
        multiply_heads<T>(score[tile], q[j].z, q[j].w, k[tile][j].z, k[tile][j].w);
      }
    float largest = most;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        score[tile][i] = base + tile * 8 + 2 * t + i < end ? score[tile][i] * scale : -FLT_MAX;
        largest = fmaxf(largest, score[tile][i]);
      }
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 2));
    const float correction = exp2f(most - largest);
    most = largest;
    sum *= correction;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        score[tile][i] = base + tile * 8 + 2 * t + i < end ? exp2f(score[tile][i] - most) : 0.0F;
        sum += score[tile][i];
      }
    const uint32_t p0 = pack_pair<T>(score[0][0], score[0][1]), p1 = pack_pair<T>(score[1][0], score[1][1]);
#pragma unroll
    for (int c = 0; c < kValueLoads; ++c) {
      const uint32_t words[4][4] = {{v[0][c].x, v[0][c].y, v[0][c].z, v[0][c].w},
                                    {v[1][c].x, v[1][c].y, v[1][c].z, v[1][c].w},
                                    {v[2][c].x, v[2][c].y, v[2][c].z, v[2][c].w},
                                    {v[3][c].x, v[3][c].y, v[3][c].z, v[3][c].w}};
#pragma unroll
      for (int i = 0; i < 8; ++i) {  // element i of each lane's eight
        const unsigned select = i % 2 == 0 ? 0x5410U : 0x7632U;
        out[c][i][0] *= correction;
        out[c][i][1] *= correction;
        multiply_heads<T>(out[c][i], p0, p1, __byte_perm(words[0][i / 2], words[1][i / 2], select),
                          __byte_perm(words[2][i / 2], words[3][i / 2], select));
      }
    }
  }
  sum += __shfl_xor_sync(kAllLanes, sum, 1);
  sum += __shfl_xor_sync(kAllLanes, sum, 2);

  // Joined over the warps, in their order.
  if (t == 0) {
    shared_max[warp][g] = most;
    shared_sum[warp][g] = sum;
  }
  __syncthreads();
  float all = -FLT_MAX, total = 0.0F;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) all = fmaxf(all, shared_max[w][g]);
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += shared_sum[w][g] * exp2f(shared_max[w][g] - all);
  const float own = exp2f(most - all);
#pragma unroll
  for (int c = 0; c < kValueLoads; ++c)
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        shared[(warp * kHeads + g) * kDim + c * 64 + 16 * t + 8 * half + i] = out[c][i][half] * own;
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

int64_t decode_splits(int64_t rows, int64_t heads, int64_t kv_heads, int64_t longest, int multiprocessors) {
  constexpr int64_t kCtasEach = 3;  // of a multiprocessor, at a time
  const int64_t group = heads / kv_heads, ctas = rows * kv_heads * ((group + kHeads - 1) / kHeads);
  const int64_t wanted = (kCtasEach * multiprocessors + ctas - 1) / ctas, most = (longest + kWarps * kKeys - 1) / (kWarps * kKeys);
  return std::clamp<int64_t>(std::min(wanted, most), 1, kMostSplits);
}

int64_t decode_partial_floats(const DecodeAttention& work) {
  return work.splits == 1 ? 0 : work.rows * work.heads * work.splits * (work.head_dim + 2);
}

cudaError_t decode_attention(const DecodeAttention& work, Stream stream) {
  if (work.rows == 0) return cudaSuccess;
  return work.type == Float::kFloat16 ? launch_dim<__half>(work, stream) : launch_dim<__nv_bfloat16>(work, stream);
}

}  // namespace qlorapp::cuda
