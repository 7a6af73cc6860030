// SPDX-License-Identifier: Apache-2.0
/// A part of a row's keys, for up to eight query heads that share a key head, is shared by some warps of a CTA, which take 16 keys in turn.
///
/// Keys and values come through a ring of each warp's own in shared memory (sm_80 and newer), so that it asks for the next while it adds up those
/// that are there. A second kernel joins the results of a row's parts.
#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cstdint>
#include <limits>
#include <numbers>

#include "async_copy.cuh"
#include "decode_attention.hpp"
#include "early_launch.cuh"
#include "head_sums.cuh"

namespace qlorapp::cuda {
namespace {

constexpr int kMostSplits = 256;
constexpr unsigned kAllLanes = 0xFFFFFFFFU;

/// Of a CTA.
__host__ __device__ constexpr int most_warps(int64_t dim) { return dim <= 128 ? 4 : 2; }

/// Each warp's tiles of 16 keys and values that are on their way or being read. A CTA has 96 KiB of them.
template <int kDim>
struct Ring {
  static constexpr int kWarps = most_warps(kDim), kStages = kDim <= 64 ? 6 : 3;
  static constexpr int kChunks = kDim / 8;            ///< Of 16 bytes, of a key.
  static constexpr int kTile = kKeys * kChunks * 16;  ///< Bytes of a tile's keys; its values follow and take as many.
  /// Of a warp: its ring, then its sums, for which code without a ring has memory.
  static constexpr int kRingBytes = kStages * 2 * kTile, kSumsBytes = kHeads * kDim * 4;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  static constexpr bool kIsThere = false;
#else
  static constexpr bool kIsThere = true;
#endif
  static constexpr int kBytes = kIsThere ? kRingBytes : kSumsBytes;

  /// Where a chunk lies, so that the lanes that read at once do not meet in a bank.
  static __device__ __forceinline__ int of_key(int key, int chunk) { return (key * kChunks + (chunk ^ (key % 2 * 4))) * 16; }
  static __device__ __forceinline__ int of_value(int key, int chunk) {
    return kTile + (key * kChunks + (chunk ^ (key / 2 % 4 * 2))) * 16;
  }
};

/// A part of the keys of a row, for up to eight query heads that share a key head.
struct Unit {
  int64_t row, first_head;
  int kv_head, heads, split;
  int from, begin, end;  ///< The first key that the query sees; the part.

  __device__ Unit(const DecodeAttention& work, int64_t index) {
    const int group = static_cast<int>(work.heads / work.kv_heads), tiles = (group + kHeads - 1) / kHeads;
    const int64_t pairs = work.kv_heads * tiles, rest = index / pairs;
    const auto pair = static_cast<int>(index % pairs), splits = static_cast<int>(work.splits);
    const bool is_there = rest < work.rows * splits;
    row = is_there ? rest / splits : 0, split = static_cast<int>(rest % splits), kv_head = pair / tiles;
    first_head = kv_head * group + pair % tiles * kHeads;
    heads = is_there ? min(kHeads, group - pair % tiles * kHeads) : 0;
    const int length = is_there ? static_cast<int>(__ldg(work.lengths + row)) : 0;
    from = work.window > 0 && length > work.window ? length - static_cast<int>(work.window) : 0;
    const int first_tile = from / kKeys * kKeys, share = (length - first_tile + splits - 1) / splits;
    const int chunk = (share + kKeys - 1) / kKeys * kKeys;
    begin = first_tile + split * chunk, end = min(begin + chunk, length);
  }
};

/// Adds the unit's keys that are the warp's turn: tiles from `start`, each `step` keys behind the one before.
template <class T, int kDim>
__device__ __forceinline__ void attend_unit(HeadSums<kDim>& sums, const DecodeAttention& work, const Unit& unit, int start,
                                            int step, unsigned char* ring, int lane) {
  constexpr int kKeyLoads = kDim / 32;
  const int g = lane / 4, t = lane % 4, dim = static_cast<int>(work.head_dim), end = unit.end;
  const KeySlots slots(unit.row, work.starts, work.shared_starts, work.shared_lengths);
  const T* const keys = static_cast<const T*>(work.k) + unit.kv_head * work.kv_head_stride;
  const T* const values = static_cast<const T*>(work.v) + unit.kv_head * work.kv_head_stride;
  const float scale = work.scale * std::numbers::log2e_v<float>;
  uint4 q[kKeyLoads];
  const T* const own_q = static_cast<const T*>(work.q) + unit.row * work.q_row_stride + (unit.first_head + g) * work.q_head_stride;
#pragma unroll
  for (int j = 0; j < kKeyLoads; ++j) {
    const int at = j * 32 + t * 8;
    q[j] = g < unit.heads && at < dim ? *reinterpret_cast<const uint4*>(own_q + at) : make_uint4(0, 0, 0, 0);
  }
  const auto q_of = [&](int j) { return q[j]; };
  using Shape = Ring<kDim>;
  if constexpr (Shape::kIsThere) {
    constexpr int kStages = Shape::kStages;
    const auto ask = [&](int base, int stage) {
      if (base < end) {
        const int64_t tile_start = slots.slot(base) * work.slot_stride;
        const int last = min(kKeys, end - base) - 1;
        unsigned char* const to = ring + stage * 2 * Shape::kTile;
#pragma unroll 8
        for (int r = 0; r < kKeys * Shape::kChunks / 32; ++r) {
          const int index = r * 32 + lane, key = index / Shape::kChunks, chunk = index % Shape::kChunks;
          const bool is_there = chunk * 8 < dim;
          const int64_t offset = is_there ? tile_start + min(key, last) * work.slot_stride + chunk * 8 : 0;
          copy_async_or_zero(to + Shape::of_key(key, chunk), keys + offset, is_there);
          copy_async_or_zero(to + Shape::of_value(key, chunk), values + offset, is_there);
        }
      }
      end_group();
    };
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) ask(start + i * step, i);
    int stage = 0;
    for (int base = start; base < end; base += step) {
      wait_groups<kStages - 2>();
      __syncwarp();  // all lanes' copies are there, and all have read the stage before
      ask(base + (kStages - 1) * step, stage == 0 ? kStages - 1 : stage - 1);
      const unsigned char* const tile = ring + stage * 2 * Shape::kTile;
      stage = stage + 1 == kStages ? 0 : stage + 1;
      add_keys<T>(
          sums, q_of,
          [&](int half, int j) { return *reinterpret_cast<const uint4*>(tile + Shape::of_key(half * 8 + g, j * 4 + t)); }, [] {},
          [&](int c, int i) {
            return *reinterpret_cast<const uint4*>(tile + Shape::of_value(i / 2 * 8 + 2 * t + i % 2, c * 8 + g));
          },
          unit.from, base, end, scale, t);
    }
    wait_groups<0>();
    __syncwarp();  // the ring is free
  } else {
    for (int base = start; base < end; base += step)
      attend_keys<T, kDim, false>(sums, q_of, keys, values, slots, work.slot_stride, unit.from, base, end, dim, scale, g, t);
  }
}

template <class T, int kDim>
__global__ void __launch_bounds__(32 * Ring<kDim>::kWarps, 2) attend(const __grid_constant__ DecodeAttention work) {
  using Shape = Ring<kDim>;
  constexpr int kFloats = Shape::kBytes / 4;
  extern __shared__ __align__(16) unsigned char rings[];
  __shared__ float shared_most[Shape::kWarps][kHeads], shared_sum[Shape::kWarps][kHeads], totals[Shape::kWarps][kHeads],
      largest[Shape::kWarps][kHeads];
  const int lane = static_cast<int>(threadIdx.x % 32U), warp = static_cast<int>(threadIdx.x / 32U);
  const int g = lane / 4, t = lane % 4, dim = static_cast<int>(work.head_dim);
  const int warps = work.warps, own = warp % warps, leader = warp - own;
  wait_for_earlier_kernels();

  const Unit unit(work, static_cast<int64_t>(blockIdx.x) * (Shape::kWarps / warps) + warp / warps);
  HeadSums<kDim> sums;
  attend_unit<T, kDim>(sums, work, unit, unit.begin + own * kKeys, warps * kKeys, rings + warp * Shape::kBytes, lane);
  float sum = sums.sum;
  sum += __shfl_xor_sync(kAllLanes, sum, 1);
  sum += __shfl_xor_sync(kAllLanes, sum, 2);

  // Joined over the unit's warps, in their order.
  if (t == 0) {
    shared_most[warp][g] = sums.most;
    shared_sum[warp][g] = sum;
  }
  __syncthreads();
  float all = -FLT_MAX, total = 0.0F;
  for (int w = 0; w < warps; ++w) all = fmaxf(all, shared_most[leader + w][g]);
  for (int w = 0; w < warps; ++w) total += shared_sum[leader + w][g] * exp2f(shared_most[leader + w][g] - all);
  const float fit = exp2f(sums.most - all);
  float* const parts = reinterpret_cast<float*>(rings);
#pragma unroll
  for (int c = 0; c < kDim / 64; ++c)
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        parts[warp * kFloats + g * kDim + c * 64 + 16 * t + 8 * half + i] = sums.out[c][i][half] * fit;
  if (own == 0 && t == 0) totals[warp][g] = total, largest[warp][g] = all;
  __syncthreads();
  const auto joined = [&](int head, int e) {
    const float* const from = parts + leader * kFloats + head * kDim + e;
    float value = from[0];
    for (int w = 1; w < warps; ++w) value += from[w * kFloats];
    return value;
  };
  const int thread = own * 32 + lane, threads = warps * 32;
  const int64_t first = unit.row * work.heads + unit.first_head;
  if (work.splits == 1) {
    T* const to = static_cast<T*>(work.out) + first * dim;
    for (int i = thread; i < unit.heads * dim; i += threads)
      to[i] = from_float<T>(joined(i / dim, i % dim) / totals[leader][i / dim]);
    return;
  }
  // [row][head][split]: the elements, then maximum and sum.
  const int64_t width = dim + 2, of_head = work.splits * width;
  float* const to = work.partial + first * of_head + unit.split * width;
  for (int i = thread; i < unit.heads * dim; i += threads) to[i / dim * of_head + i % dim] = joined(i / dim, i % dim);
  if (thread < unit.heads) {
    to[thread * of_head + dim] = largest[leader][thread];
    to[thread * of_head + dim + 1] = totals[leader][thread];
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
  using Shape = Ring<kDim>;
  constexpr auto kKernel = attend<T, kDim>;
  if (work.warps < 1 || Shape::kWarps % work.warps != 0 || work.splits < 1 || work.splits > kMostSplits)
    return cudaErrorInvalidValue;
  static std::atomic<signed char> known_old[64], known_room[64];
  const bool is_old = once_a_device(known_old, [] {
    const int architecture = architecture_of_code(reinterpret_cast<const void*>(kKernel));
    return architecture > 0 && architecture < 80;
  });
  const int bytes = Shape::kWarps * (is_old ? Shape::kSumsBytes : Shape::kRingBytes);
  const bool has_room = once_a_device(known_room, [bytes] {
    return cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) == cudaSuccess;
  });
  if (!has_room) return cudaErrorLaunchOutOfResources;
  const int64_t in_cta = Shape::kWarps / work.warps,
                ctas = (pairs_of(work.rows, work.heads, work.kv_heads) * work.splits + in_cta - 1) / in_cta;
  const cudaError_t error = launch_early<kKernel>(dim3(static_cast<unsigned>(ctas)), 32 * Shape::kWarps, bytes, stream, work);
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

void divide_keys(DecodeAttention& work, int64_t longest, int multiprocessors) {
  const int64_t pairs = pairs_of(work.rows, work.heads, work.kv_heads),
                slots = int64_t{2} * multiprocessors;  // CTAs at a time; their shared memory decides
  const int most = most_warps(work.head_dim);
  // Times, in KiB that a CTA reads while all slots are full. Where few are, a CTA is at most so much faster; to begin and to join takes as long as to
  // read so much. All as measured on an H200.
  constexpr double kAlone = 0.45, kBeginning = 64, kJoining = 27;
  const double key = static_cast<double>(work.head_dim) * 4 / 1024, parts = static_cast<double>(work.rows * work.heads) * key * 2;
  double least = std::numeric_limits<double>::max();
  for (int warps = most; warps >= 1; warps /= 2) {
    const int64_t each = warps * kKeys;
    for (int64_t splits = 1; splits <= std::min<int64_t>(kMostSplits, (longest + each - 1) / each); ++splits) {
      const int64_t ctas = (pairs * splits * warps + most - 1) / most, full = ctas / slots, rest = ctas % slots;
      const int64_t tiles = ((longest + splits - 1) / splits + each - 1) / each;  // of a warp
      const double last = rest == 0 ? 0.0 : std::max(kAlone, static_cast<double>(rest) / static_cast<double>(slots));
      const double reading = static_cast<double>(tiles * most * kKeys) * key * (static_cast<double>(full) + last);
      const double joining = splits == 1 ? 0.0 : kJoining + parts * static_cast<double>(splits) / static_cast<double>(slots);
      const double cost = reading + kBeginning * static_cast<double>(full + (rest > 0 ? 1 : 0)) + joining;
      if (cost < least) work.splits = splits, work.warps = warps, least = cost;
    }
  }
}

int64_t decode_partial_floats(const DecodeAttention& work) {
  return work.splits == 1 ? 0 : work.rows * work.heads * work.splits * (work.head_dim + 2);
}

cudaError_t decode_attention(const DecodeAttention& work, Stream stream) {
  if (work.rows == 0) return cudaSuccess;
  return work.type == Float::kFloat16 ? launch_dim<__half>(work, stream) : launch_dim<__nv_bfloat16>(work, stream);
}

}  // namespace qlorapp::cuda
