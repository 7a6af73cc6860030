// SPDX-License-Identifier: Apache-2.0
/// Both kernels keep codes on their way: cp.async brings them from memory into a ring of shared memory while earlier ones are multiplied, and the
/// first of them are asked for before the kernel in front has ended, which cannot have written them. Operands are formed as in gemm_4bit.cu: W is the
/// tensor cores' first operand, a byte becomes a pair by a look-up, and which k a product adds up is the lanes' choice.
///
///     few_rows    up to 8 rows of x. A warp has 16 rows of W and every eighth piece of k; CTAs stay and take strips of 16 rows in turn.
///     more_rows   up to 128. A warp has 32 rows of W and all of x, which the CTA's warps share in shared memory; k is divided among CTAs, whose
///                 sums a second kernel adds up, with the adapter's part.
///
/// Pieces of 32 bytes of a row of codes are exchanged (by the row's last bits) so that lanes which read together read different banks.
#include "gemm_4bit_group.hpp"

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "code_books.cuh"
#include "early_launch.cuh"
#include "element.cuh"
#include "pair_table.cuh"
#include "tensor_core.cuh"

namespace qlorapp::cuda {
namespace {

constexpr int kBlock = 64, kWarps = 8, kThreads = 32 * kWarps;

__device__ __forceinline__ uint32_t shared_address(const void* place) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(place));
}
template <int kBytes>
__device__ __forceinline__ void copy_async(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
  if constexpr (kBytes == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from));
  else asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from), "n"(kBytes));
#endif
}
__device__ __forceinline__ void end_group() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;");
#endif
}
/// Until at most kLeft of the groups that this thread ended are on their way.
template <int kLeft>
__device__ __forceinline__ void wait_groups() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
#endif
}

struct Work {
  GemmFourBitGroup asked;
  Divisor nested_block;
  bool nested, nf4;
  int64_t first_strip[GemmFourBitGroup::kMostWeights + 1];  ///< Of each weight, in strips of the kernel's height; then of all.
  int64_t first_row[GemmFourBitGroup::kMostWeights + 1];
  int64_t splits;   ///< Of k.
  bool wide_ranks;  ///< Rows of u and B are whole 16 bytes.
};

/// The weight that a strip belongs to.
__device__ __forceinline__ int weight_of(const Work& work, int64_t strip) {
  int i = 0;
#pragma unroll
  for (int next = 1; next < GemmFourBitGroup::kMostWeights; ++next)
    i += next < work.asked.count && strip >= work.first_strip[next] ? 1 : 0;
  return i;
}

/// What a byte of codes becomes, for two rows of W: eight pairs each.
template <class T>
__device__ __forceinline__ void pairs_of(const PairTable& table, uint2 codes, uint32_t lane_bytes, uint32_t (&pairs)[8]) {
  pairs[0] = pair_of<0>(table, codes.x, lane_bytes);
  pairs[1] = pair_of<1>(table, codes.x, lane_bytes);
  pairs[2] = pair_of<2>(table, codes.x, lane_bytes);
  pairs[3] = pair_of<3>(table, codes.x, lane_bytes);
  pairs[4] = pair_of<0>(table, codes.y, lane_bytes);
  pairs[5] = pair_of<1>(table, codes.y, lane_bytes);
  pairs[6] = pair_of<2>(table, codes.y, lane_bytes);
  pairs[7] = pair_of<3>(table, codes.y, lane_bytes);
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

/// scaling · u·Bᵀ + bias of one element.
template <class T>
__device__ __forceinline__ float added(const Work& work, const GroupWeight& weight, int64_t token, int64_t row, int64_t column) {
  float sum = 0.0F;
  if (weight.b != nullptr) {
    const T* const b = static_cast<const T*>(weight.b) + row * weight.rank;
    const T* const u = static_cast<const T*>(work.asked.u) + token * work.asked.u_stride + weight.u_column;
    if (work.wide_ranks) {
      for (int64_t r = 0; r < weight.rank; r += 8) {
        float own[8], of_b[8];
        load_eight(u + r, own);
        load_eight(b + r, of_b);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += own[i] * of_b[i];
      }
    } else {
      for (int64_t r = 0; r < weight.rank; ++r) sum += to_float(u[r]) * to_float(b[r]);
    }
    sum *= weight.scaling;
  }
  return work.asked.bias == nullptr ? sum : sum + to_float(static_cast<const T*>(work.asked.bias)[column]);
}

// --- up to 8 rows of x

constexpr int kFewRing = 3, kStage = 256, kStrip = 16, kFewTokens = 8;
constexpr int kStageCodes = kStrip * kStage / 2, kStageBytes = kStageCodes + 256;  // then scales
constexpr int kFewParts = kWarps * kFewTokens * kStrip;
constexpr int kFewBytes = static_cast<int>(sizeof(PairTable)) + 1024 + 2 * kFewParts * 4 + kWarps * kFewRing * kStageBytes;

/// Where a warp is among its pieces: strips of the CTA, and in each every eighth stage.
struct Place {
  int64_t strip;
  int stage;
  __device__ void advance(int stages, int warp) {
    stage += kWarps;
    if (stage < stages) return;
    stage = warp;
    strip += gridDim.x;
  }
};

template <class T>
__device__ __forceinline__ void ask_few(const Work& work, const Place& at, int stages, unsigned char* to, int lane) {
  if (at.strip < work.first_strip[work.asked.count] && at.stage < stages) {
    const int i = weight_of(work, at.strip);
    const GroupWeight& weight = work.asked.weights[i];
    const int64_t row0 = (at.strip - work.first_strip[i]) * kStrip, k = work.asked.k, blocks = k / kBlock;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int row = q * 4 + lane / 8, piece = lane % 8;
      const int64_t from = min(row0 + row, weight.n - 1) * (k / 2) + at.stage * (kStage / 2) + piece * 16;
      copy_async<16>(to + row * (kStage / 2) + ((piece / 2) ^ (row & 3)) * 32 + (piece % 2) * 16, weight.packed + from);
    }
    const int64_t scale = min(row0 + lane % 16, weight.n - 1) * blocks + at.stage * 4;
    unsigned char* const scales = to + kStageCodes;
    if (work.nested) {
      if (lane < 16) copy_async<4>(scales + lane * 4, static_cast<const uint8_t*>(weight.absmax) + scale);
      else copy_async<4>(scales + 64 + (lane - 16) * 4, weight.nested_absmax + divide(scale, work.nested_block));
    } else if (lane < 16) {
      copy_async<16>(scales + lane * 16, static_cast<const float*>(weight.absmax) + scale);
    }
  }
  end_group();
}

template <class T>
__global__ void __launch_bounds__(kThreads, 2) few_rows(const __grid_constant__ Work work) {
  extern __shared__ __align__(128) unsigned char shared[];
  PairTable& table = *reinterpret_cast<PairTable*>(shared);
  float* const map = reinterpret_cast<float*>(shared + sizeof(PairTable));
  float* const parts = map + 256;
  const int lane = static_cast<int>(threadIdx.x % 32U), warp = static_cast<int>(threadIdx.x / 32U);
  const int g = lane / 4, t = lane % 4;
  unsigned char* const ring = shared + sizeof(PairTable) + 1024 + 2 * kFewParts * 4 + warp * kFewRing * kStageBytes;
  const int stages = static_cast<int>(work.asked.k / kStage), m = static_cast<int>(work.asked.m);
  const int64_t strips = work.first_strip[work.asked.count];

  Place next{static_cast<int64_t>(blockIdx.x), warp};
  int asked = 0;  // slot
  for (int i = 0; i < kFewRing - 1; ++i) {
    ask_few<T>(work, next, stages, ring + asked * kStageBytes, lane);
    if (warp < stages) next.advance(stages, warp);
    asked = asked + 1 == kFewRing ? 0 : asked + 1;
  }
  fill<T>(table, work.nf4);
  for (unsigned i = threadIdx.x; i < 256U; i += kThreads) map[i] = __ldg(kDeviceSignedMap.values + i);
  wait_for_earlier_kernels();
  __syncthreads();

  const T* const x = static_cast<const T*>(work.asked.x) + min(g, m - 1) * work.asked.x_stride + t * 16;
  const uint32_t lane_bytes = static_cast<uint32_t>(lane) * 4U;
  int slot = 0, turn = 0;
  for (int64_t strip = blockIdx.x; strip < strips; strip += gridDim.x, turn ^= 1) {
    const int own = weight_of(work, strip);
    const GroupWeight& weight = work.asked.weights[own];
    const float offset = work.nested ? __ldg(weight.nested_offset) : 0.0F;
    float sums[4] = {};
    for (int stage = warp; stage < stages; stage += kWarps) {
      uint4 x_low[4], x_high[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto* const from = reinterpret_cast<const uint4*>(x + stage * kStage + i * kBlock);
        x_low[i] = __ldg(from);
        x_high[i] = __ldg(from + 1);
      }
      wait_groups<kFewRing - 2>();
      __syncwarp();
      ask_few<T>(work, next, stages, ring + asked * kStageBytes, lane);
      next.advance(stages, warp);
      asked = asked + 1 == kFewRing ? 0 : asked + 1;
      const unsigned char* const here = ring + slot * kStageBytes;
      slot = slot + 1 == kFewRing ? 0 : slot + 1;
      float scales[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = half * 8 + g;
        if (work.nested) {
          const uint32_t codes = *reinterpret_cast<const uint32_t*>(here + kStageCodes + row * 4);
          const float outer = *reinterpret_cast<const float*>(here + kStageCodes + 64 + row * 4);
#pragma unroll
          for (int i = 0; i < 4; ++i) scales[half][i] = decode_scale_rn(map[(codes >> (8 * i)) & 255U], outer, offset);
        } else {
          const float4 all = *reinterpret_cast<const float4*>(here + kStageCodes + row * 16);
          scales[half][0] = all.x, scales[half][1] = all.y, scales[half][2] = all.z, scales[half][3] = all.w;
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t a[8], b[8];
        const int place = (i ^ (g & 3)) * 32 + t * 8;
        pairs_of<T>(table, *reinterpret_cast<const uint2*>(here + g * (kStage / 2) + place), lane_bytes, a);
        pairs_of<T>(table, *reinterpret_cast<const uint2*>(here + (g + 8) * (kStage / 2) + place), lane_bytes, b);
        multiply_block<T>(sums, a, b, x_low[i], x_high[i], scales[0][i], scales[1][i]);
      }
    }
    // [warp][token][row], in two places by turns: what is read of one strip is not yet written by the next.
    float* const all = parts + turn * kFewParts;
#pragma unroll
    for (int i = 0; i < 4; ++i) all[(warp * kFewTokens + t * 2 + i % 2) * kStrip + i / 2 * 8 + g] = sums[i];
    const int token = static_cast<int>(threadIdx.x) / kStrip, row = static_cast<int>(threadIdx.x) % kStrip;
    const int64_t own_row = (strip - work.first_strip[own]) * kStrip + row, column = work.first_row[own] + own_row;
    const bool is_wanted = token < m && own_row < weight.n;
    float sum = is_wanted ? added<T>(work, weight, token, own_row, column) : 0.0F;
    __syncthreads();
    if (!is_wanted) continue;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += all[(w * kFewTokens + token) * kStrip + row];
    static_cast<T*>(work.asked.y)[token * work.asked.y_stride + column] = from_float<T>(sum);
  }
  wait_groups<0>();
}

// --- up to 128 rows of x

constexpr int kHigh = 256, kDeep = 128;  // of a CTA: rows of W; k of a stage
constexpr int kHighCodes = kHigh * kDeep / 2;

template <int kTokenTiles>
struct High {
  static constexpr int kTokens = 8 * kTokenTiles, kX = kTokens * kDeep * 2, kBytesEach = kHighCodes + kX;
  static constexpr int kRing = kTokenTiles >= 16 ? 3 : 4;
  static constexpr int kBytes = static_cast<int>(sizeof(PairTable)) + 1024 + kRing * kBytesEach;
};

__device__ __forceinline__ void ask_codes(const Work& work, const GroupWeight& weight, int64_t row0, int64_t stage, int64_t end,
                                          unsigned char* to) {
  if (stage >= end) return;
  const int64_t k = work.asked.k;
#pragma unroll
  for (int q = 0; q < kHigh * 4 / kThreads; ++q) {
    const int piece = q * kThreads + static_cast<int>(threadIdx.x), row = piece / 4, part = piece % 4;
    copy_async<16>(to + row * (kDeep / 2) + ((part / 2) ^ ((row >> 1) & 1)) * 32 + (part % 2) * 16,
                   weight.packed + min(row0 + row, weight.n - 1) * (k / 2) + stage * (kDeep / 2) + part * 16);
  }
}
template <class T, int kTokenTiles>
__device__ __forceinline__ void ask_x(const Work& work, int64_t stage, int64_t end, unsigned char* to) {
  if (stage < end) {
    const T* const x = static_cast<const T*>(work.asked.x);
    for (int piece = static_cast<int>(threadIdx.x); piece < kTokenTiles * 8 * 16; piece += kThreads) {
      const int token = piece / 16, part = piece % 16;
      const int64_t row = min(static_cast<int64_t>(token), work.asked.m - 1);
      copy_async<16>(to + kHighCodes + token * (kDeep * 2) + (part ^ (token & 1)) * 16,
                     x + row * work.asked.x_stride + stage * kDeep + part * 8);
    }
  }
  end_group();
}

/// Of one stage: what makes the scales of a lane's four rows of W.
struct Scales {
  float outer[2][2][2];  ///< [tile][half]: without nesting of both blocks, else the first is that of both.
  uint32_t codes[2][2];
};

template <class T, int kTokenTiles>
__global__ void __launch_bounds__(kThreads, 1) more_rows(const __grid_constant__ Work work) {
  using Shape = High<kTokenTiles>;
  extern __shared__ __align__(128) unsigned char shared[];
  PairTable& table = *reinterpret_cast<PairTable*>(shared);
  float* const map = reinterpret_cast<float*>(shared + sizeof(PairTable));
  unsigned char* const ring = shared + sizeof(PairTable) + 1024;
  const int lane = static_cast<int>(threadIdx.x % 32U), warp = static_cast<int>(threadIdx.x / 32U);
  const int g = lane / 4, t = lane % 4;
  const int own = weight_of(work, blockIdx.x);
  const GroupWeight& weight = work.asked.weights[own];
  const int64_t row0 = (static_cast<int64_t>(blockIdx.x) - work.first_strip[own]) * kHigh, blocks = work.asked.k / kBlock;
  const int64_t stages = work.asked.k / kDeep, share = (stages + work.splits - 1) / work.splits;
  const int64_t begin = blockIdx.y * share, end = min(begin + share, stages);

  const auto scales_of = [&](int64_t stage) {
    Scales found{};
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t row = min(row0 + warp * 32 + tile * 16 + half * 8 + g, weight.n - 1);
        const int64_t scale = row * blocks + min(stage, stages - 1) * 2;
        if (work.nested) {
          found.codes[tile][half] = __ldg(reinterpret_cast<const uint16_t*>(static_cast<const uint8_t*>(weight.absmax) + scale));
          found.outer[tile][half][0] = __ldg(weight.nested_absmax + divide(scale, work.nested_block));
        } else {
          const float2 both = __ldg(reinterpret_cast<const float2*>(static_cast<const float*>(weight.absmax) + scale));
          found.outer[tile][half][0] = both.x, found.outer[tile][half][1] = both.y;
        }
      }
    return found;
  };

#pragma unroll
  for (int i = 0; i < Shape::kRing - 1; ++i) ask_codes(work, weight, row0, begin + i, end, ring + i * Shape::kBytesEach);
  Scales next = scales_of(begin);
  const float offset = work.nested ? __ldg(weight.nested_offset) : 0.0F;
  fill<T>(table, work.nf4);
  for (unsigned i = threadIdx.x; i < 256U; i += kThreads) map[i] = __ldg(kDeviceSignedMap.values + i);
  wait_for_earlier_kernels();
#pragma unroll
  for (int i = 0; i < Shape::kRing - 1; ++i) ask_x<T, kTokenTiles>(work, begin + i, end, ring + i * Shape::kBytesEach);

  float sums[2][kTokenTiles][4] = {};
  const uint32_t lane_bytes = static_cast<uint32_t>(lane) * 4U;
  int slot = 0, asked = Shape::kRing - 1;
  for (int64_t stage = begin; stage < end; ++stage) {
    wait_groups<Shape::kRing - 2>();
    __syncthreads();  // of all threads' copies; and the slot that is asked for next was read by all
    ask_codes(work, weight, row0, stage + Shape::kRing - 1, end, ring + asked * Shape::kBytesEach);
    ask_x<T, kTokenTiles>(work, stage + Shape::kRing - 1, end, ring + asked * Shape::kBytesEach);
    asked = asked + 1 == Shape::kRing ? 0 : asked + 1;
    const Scales now = next;
    next = scales_of(stage + 1);
    const unsigned char* const here = ring + slot * Shape::kBytesEach;
    slot = slot + 1 == Shape::kRing ? 0 : slot + 1;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t pairs[2][2][8];
      float scales[2][2];
#pragma unroll
      for (int tile = 0; tile < 2; ++tile)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = warp * 32 + tile * 16 + half * 8 + g;
          const int place = row * (kDeep / 2) + (i ^ ((row >> 1) & 1)) * 32 + t * 8;
          pairs_of<T>(table, *reinterpret_cast<const uint2*>(here + place), lane_bytes, pairs[tile][half]);
          scales[tile][half] =
              work.nested ? decode_scale_rn(map[(now.codes[tile][half] >> (8 * i)) & 255U], now.outer[tile][half][0], offset)
                          : now.outer[tile][half][i];
        }
#pragma unroll
      for (int token = 0; token < kTokenTiles; ++token) {
        const unsigned char* const x = here + kHighCodes + (token * 8 + g) * (kDeep * 2);
        const int part = i * 8 + t * 2;
        const uint4 low = *reinterpret_cast<const uint4*>(x + (part ^ (g & 1)) * 16);
        const uint4 high = *reinterpret_cast<const uint4*>(x + ((part + 1) ^ (g & 1)) * 16);
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
          multiply_block<T>(sums[tile][token], pairs[tile][0], pairs[tile][1], low, high, scales[tile][0], scales[tile][1]);
      }
    }
  }
  wait_groups<0>();

  // [split][token][row of all weights]
  const int64_t width = work.first_row[work.asked.count];
  float* const to = work.asked.partial + (static_cast<int64_t>(blockIdx.y) * work.asked.m) * width + work.first_row[own];
#pragma unroll
  for (int tile = 0; tile < 2; ++tile)
#pragma unroll
    for (int token = 0; token < kTokenTiles; ++token)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t at = token * 8 + t * 2 + i % 2, row = row0 + warp * 32 + tile * 16 + i / 2 * 8 + g;
        if (at < work.asked.m && row < weight.n) to[at * width + row] = sums[tile][token][i];
      }
}

/// A thread has one column and eight rows of y.
template <class T>
__global__ void __launch_bounds__(256) finish(const __grid_constant__ Work work) {
  constexpr int kRows = 8, kRanks = 16;
  const int64_t width = work.first_row[work.asked.count], column = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kRows;
  wait_for_earlier_kernels();
  if (column >= width) return;
  int own = 0;
#pragma unroll
  for (int next = 1; next < GemmFourBitGroup::kMostWeights; ++next)
    own += next < work.asked.count && column >= work.first_row[next] ? 1 : 0;
  const GroupWeight& weight = work.asked.weights[own];
  const int rows = static_cast<int>(min(static_cast<int64_t>(kRows), work.asked.m - first));
  float sums[kRows] = {};
  if (weight.b != nullptr) {
    const T* const b = static_cast<const T*>(weight.b) + (column - work.first_row[own]) * weight.rank;
    for (int64_t r0 = 0; r0 < weight.rank; r0 += kRanks) {
      float values[kRanks];
#pragma unroll
      for (int r = 0; r < kRanks; ++r) values[r] = r0 + r < weight.rank ? to_float(b[r0 + r]) : 0.0F;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (i >= rows) break;
        const T* const u = static_cast<const T*>(work.asked.u) + (first + i) * work.asked.u_stride + weight.u_column + r0;
#pragma unroll
        for (int r = 0; r < kRanks; ++r)
          if (r0 + r < weight.rank) sums[i] += to_float(u[r]) * values[r];
      }
    }
  }
  const float bias = work.asked.bias == nullptr ? 0.0F : to_float(static_cast<const T*>(work.asked.bias)[column]);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (i >= rows) break;
    float sum = sums[i] * weight.scaling + bias;
    const float* const from = work.asked.partial + (first + i) * width + column;
    for (int64_t s = 0; s < work.splits; ++s) sum += from[s * work.asked.m * width];
    static_cast<T*>(work.asked.y)[(first + i) * work.asked.y_stride + column] = from_float<T>(sum);
  }
}

/// A CTA has one row of A and up to eight rows of x.
template <class T>
__global__ void __launch_bounds__(256) products(const __grid_constant__ FewProducts work) {
  constexpr int kRows = 8;
  __shared__ float parts[8][kRows];
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kRows;
  const int rows = static_cast<int>(min(static_cast<int64_t>(kRows), work.m - first));
  const T* const a = static_cast<const T*>(work.a) + static_cast<int64_t>(blockIdx.x) * work.k;
  wait_for_earlier_kernels();  // A may have been written by the one in front
  float sums[kRows] = {};
  for (int64_t at = threadIdx.x * 8; at < work.k; at += 256 * 8) {
    float own[8];
    load_eight(a + at, own);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (i >= rows) break;
      float x[8];
      load_eight(static_cast<const T*>(work.x) + (first + i) * work.x_stride + at, x);
#pragma unroll
      for (int j = 0; j < 8; ++j) sums[i] += own[j] * x[j];
    }
  }
  const int lane = static_cast<int>(threadIdx.x % 32U), warp = static_cast<int>(threadIdx.x / 32U);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sums[i] += __shfl_xor_sync(kAllLanes, sums[i], step);
    if (lane == 0) parts[warp][i] = sums[i];
  }
  __syncthreads();
  if (static_cast<int>(threadIdx.x) >= rows) return;
  float sum = 0.0F;
#pragma unroll
  for (int w = 0; w < 8; ++w) sum += parts[w][threadIdx.x];
  static_cast<T*>(work.u)[(first + threadIdx.x) * work.n + blockIdx.x] = from_float<T>(sum);
}

Work work_of(const GemmFourBitGroup& asked, int64_t height) {
  Work work{.asked = asked,
            .nested_block = make_divisor(asked.nested_block_size),
            .nested = asked.weights[0].nested_absmax != nullptr,
            .nf4 = asked.quant_type == QuantType::kNf4,
            .first_strip = {},
            .first_row = {},
            .splits = 1,
            .wide_ranks = asked.u_stride % 8 == 0 && aligned_to(asked.u, 16)};
  for (int i = 0; i < asked.count; ++i) {
    work.first_strip[i + 1] = work.first_strip[i] + (asked.weights[i].n + height - 1) / height;
    work.first_row[i + 1] = work.first_row[i] + asked.weights[i].n;
    work.wide_ranks = work.wide_ranks && asked.weights[i].rank % 8 == 0 && asked.weights[i].u_column % 8 == 0 &&
                      aligned_to(asked.weights[i].b, 16);
  }
  return work;
}

int64_t splits_of(const Work& work, int multiprocessors) {
  const int64_t strips = work.first_strip[work.asked.count], stages = work.asked.k / kDeep;
  return std::clamp<int64_t>(multiprocessors / std::max<int64_t>(1, strips), 1, std::max<int64_t>(1, stages / 2));
}

template <class Kernel>
cudaError_t allow(Kernel kernel, int bytes, std::atomic<signed char> (&known)[64]) {
  const bool allowed = once_a_device(
      known, [&] { return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) == cudaSuccess; });
  return allowed ? cudaSuccess : cudaErrorInvalidValue;
}

template <class T>
cudaError_t launch_few(const GemmFourBitGroup& asked, int multiprocessors, Stream stream) {
  static std::atomic<signed char> known[64];
  if (const cudaError_t error = allow(few_rows<T>, kFewBytes, known); error != cudaSuccess) return error;
  const Work work = work_of(asked, kStrip);
  const auto ctas = static_cast<unsigned>(std::min<int64_t>(work.first_strip[asked.count], 2 * multiprocessors));
  return launch_early<few_rows<T>>(dim3(ctas), kThreads, kFewBytes, stream, work);
}

template <class T, int kTokenTiles>
cudaError_t launch_more(const GemmFourBitGroup& asked, int multiprocessors, Stream stream) {
  static std::atomic<signed char> known[64];
  constexpr int kBytes = High<kTokenTiles>::kBytes;
  if (const cudaError_t error = allow(more_rows<T, kTokenTiles>, kBytes, known); error != cudaSuccess) return error;
  Work work = work_of(asked, kHigh);
  work.splits = splits_of(work, multiprocessors);
  const dim3 grid(static_cast<unsigned>(work.first_strip[asked.count]), static_cast<unsigned>(work.splits));
  if (const cudaError_t error = launch_early<more_rows<T, kTokenTiles>>(grid, kThreads, kBytes, stream, work); error != cudaSuccess)
    return error;
  const dim3 rest(static_cast<unsigned>((work.first_row[asked.count] + 255) / 256), static_cast<unsigned>((asked.m + 7) / 8));
  return launch_early<finish<T>>(rest, 256, 0, stream, work);
}

template <class T>
cudaError_t launch(const GemmFourBitGroup& asked, int multiprocessors, Stream stream) {
  if (asked.m <= kFewTokens) return launch_few<T>(asked, multiprocessors, stream);
  if (asked.m <= 16) return launch_more<T, 2>(asked, multiprocessors, stream);
  if (asked.m <= 32) return launch_more<T, 4>(asked, multiprocessors, stream);
  if (asked.m <= 64) return launch_more<T, 8>(asked, multiprocessors, stream);
  return launch_more<T, 16>(asked, multiprocessors, stream);
}

}  // namespace

bool has_gemm_4bit_group(int64_t m, int64_t k, int64_t block_size, int64_t nested_block_size, Float type, int arch) {
  return arch >= 90 && type != Float::kFloat32 && m >= 1 && m <= 128 && k >= kStage && k % kStage == 0 && block_size == kBlock &&
         nested_block_size % 4 == 0;
}

int64_t gemm_4bit_group_floats(const GemmFourBitGroup& asked, int multiprocessors) {
  if (asked.m <= kFewTokens) return 0;
  const Work work = work_of(asked, kHigh);
  return splits_of(work, multiprocessors) * asked.m * work.first_row[asked.count];
}

cudaError_t gemm_4bit_group(const GemmFourBitGroup& work, int multiprocessors, Stream stream) {
  return work.type == Float::kFloat16 ? launch<__half>(work, multiprocessors, stream)
                                      : launch<__nv_bfloat16>(work, multiprocessors, stream);
}

cudaError_t few_products(const FewProducts& work, Stream stream) {
  const dim3 grid(static_cast<unsigned>(work.n), static_cast<unsigned>((work.m + 7) / 8));
  return work.type == Float::kFloat16 ? launch_early<products<__half>>(grid, 256, 0, stream, work)
                                      : launch_early<products<__nv_bfloat16>>(grid, 256, 0, stream, work);
}

}  // namespace qlorapp::cuda
