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
#include "tensor_core.cuh"

namespace qlorapp::cuda {
namespace {

constexpr int kBlock = 64, kWarps = 8, kThreads = 32 * kWarps;
constexpr unsigned kAllLanes = 0xFFFFFFFFU;

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
  int64_t splits;              ///< Of k.
  int64_t strips_each, tiles;  ///< Of up to 8 rows of x: strips of a team at a time, and how often that is.
  bool wide_ranks;             ///< Rows of u and B are whole 16 bytes.
};

/// The weight that a strip belongs to.
__device__ __forceinline__ int weight_of(const Work& work, int64_t strip) {
  int i = 0;
#pragma unroll
  for (int next = 1; next < GemmFourBitGroup::kMostWeights; ++next)
    i += next < work.asked.count && strip >= work.first_strip[next] ? 1 : 0;
  return i;
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
    const T* const u = static_cast<const T*>(work.asked.u) + token * work.asked.ranks + weight.u_column;
    if (work.wide_ranks) {
      for (int64_t r = 0; r < weight.rank; r += 8) {
        const uint4 words = __ldcg(reinterpret_cast<const uint4*>(u + r));  // of this launch: not by way of L1
        T own_elements[8];
        memcpy(own_elements, &words, sizeof words);
        float own[8], of_b[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) own[i] = to_float(own_elements[i]);
        load_eight(b + r, of_b);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += own[i] * of_b[i];
      }
    } else {
      for (int64_t r = 0; r < weight.rank; ++r) {
        const unsigned short bits = __ldcg(reinterpret_cast<const unsigned short*>(u + r));
        T own;
        memcpy(&own, &bits, sizeof own);
        sum += to_float(own) * to_float(b[r]);
      }
    }
    sum *= weight.scaling;
  }
  return work.asked.bias == nullptr ? sum : sum + to_float(static_cast<const T*>(work.asked.bias)[column]);
}

// --- up to 8 rows of x

constexpr int kTeams = 2, kFewThreads = kTeams * kThreads;  // teams of eight warps, which share the table alone
constexpr int kFewRing = 3, kStage = 256, kStrip = 16, kFewTokens = 8;
constexpr int kStageCodes = kStrip * kStage / 2, kStageBytes = kStageCodes + 256;  // then scales
constexpr int kFewParts = kWarps * kFewTokens * kStrip;
constexpr int kEntry = 256;  ///< Bytes from one byte's pairs to the next's: an offset is put together by one permutation.
constexpr int kFewBytes = 256 * kEntry + 1024 + kTeams * (2 * kFewParts * 4 + kWarps * kFewRing * kStageBytes);

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
/// @param lane_bytes  of the lane's own bank.
template <int kByte>
__device__ __forceinline__ uint32_t wide_pair(const unsigned char* table, uint32_t word, uint32_t lane_bytes) {
  return *reinterpret_cast<const uint32_t*>(table + __byte_perm(word, lane_bytes, 0x5504U | (kByte << 4)));
}
__device__ __forceinline__ void wide_pairs(const unsigned char* table, uint2 codes, uint32_t lane_bytes, uint32_t (&pairs)[8]) {
  pairs[0] = wide_pair<0>(table, codes.x, lane_bytes);
  pairs[1] = wide_pair<1>(table, codes.x, lane_bytes);
  pairs[2] = wide_pair<2>(table, codes.x, lane_bytes);
  pairs[3] = wide_pair<3>(table, codes.x, lane_bytes);
  pairs[4] = wide_pair<0>(table, codes.y, lane_bytes);
  pairs[5] = wide_pair<1>(table, codes.y, lane_bytes);
  pairs[6] = wide_pair<2>(table, codes.y, lane_bytes);
  pairs[7] = wide_pair<3>(table, codes.y, lane_bytes);
}

/// What a warp asks for next: of its strip in a tile the stages part, part + splits, …; tiles of the team in turn.
struct Asking {
  int64_t tile;
  int stage;
  const unsigned char* packed;  ///< Of the weight.
  const unsigned char* scales;  ///< What this lane copies of a stage's scales.
  uint32_t rows[4];             ///< Offsets of this lane's 16 bytes in stage 0, of four rows.
  uint32_t scale;               ///< Of this lane's row, in blocks.
};

__device__ __forceinline__ void aim(const Work& work, Asking& asking, int64_t strip, int lane) {
  const int own = weight_of(work, strip);
  const GroupWeight& weight = work.asked.weights[own];
  const auto row0 = static_cast<uint32_t>(strip - work.first_strip[own]) * kStrip, last = static_cast<uint32_t>(weight.n) - 1;
  const auto row_bytes = static_cast<uint32_t>(work.asked.k / 2);
  asking.packed = weight.packed;
#pragma unroll
  for (uint32_t q = 0; q < 4; ++q)
    asking.rows[q] = min(row0 + q * 4 + static_cast<uint32_t>(lane) / 8, last) * row_bytes + static_cast<uint32_t>(lane) % 8 * 16;
  asking.scale = min(row0 + static_cast<uint32_t>(lane) % 16, last) * static_cast<uint32_t>(work.asked.k / kBlock);
  asking.scales = static_cast<const unsigned char*>(lane < 16 ? weight.absmax : weight.nested_absmax);
}

__device__ __forceinline__ void ask_few(const Work& work, const Asking& asking, bool is_there, unsigned char* to, int lane) {
  if (is_there) {
    const unsigned char* const from = asking.packed + asking.stage * (kStage / 2);
    unsigned char* const place = to + lane / 8 * (kStage / 2) + ((lane % 8 / 2) ^ (lane / 8)) * 32 + (lane % 2) * 16;
#pragma unroll
    for (int q = 0; q < 4; ++q) copy_async<16>(place + q * 4 * (kStage / 2), from + asking.rows[q]);
    const uint32_t scale = asking.scale + static_cast<uint32_t>(asking.stage) * 4;
    unsigned char* const scales = to + kStageCodes;
    if (work.nested) {
      const uint32_t nested =
          work.nested_block.shift >= 0 ? scale >> work.nested_block.shift : scale / static_cast<uint32_t>(work.nested_block.value);
      copy_async<4>(scales + lane * 4, asking.scales + (lane < 16 ? scale : nested * 4));
    } else if (lane < 16) {
      copy_async<16>(scales + lane * 16, asking.scales + static_cast<int64_t>(scale) * 4);
    }
  }
  end_group();
}

__device__ __forceinline__ void join_team(int team) { asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "n"(kThreads) : "memory"); }

/// A team's part of u: rows of A in turn, each of all rows of x. The others see it once they have counted all.
template <class T>
__device__ __forceinline__ void form_u(const Work& work, float* parts, int64_t first, int64_t step, int team, int thread) {
  const int m = static_cast<int>(work.asked.m), lane = thread % 32, warp = thread / 32;
  for (int64_t rank = first; rank < work.asked.ranks; rank += step) {
    const T* const a = static_cast<const T*>(work.asked.a) + rank * work.asked.k;
    float sums[kFewTokens] = {};
    for (int64_t at = thread * 8; at < work.asked.k; at += kThreads * 8) {
      float own[8];
      load_eight(a + at, own);
#pragma unroll
      for (int i = 0; i < kFewTokens; ++i) {
        if (i >= m) break;
        float x[8];
        load_eight(static_cast<const T*>(work.asked.x) + i * work.asked.x_stride + at, x);
#pragma unroll
        for (int e = 0; e < 8; ++e) sums[i] += own[e] * x[e];
      }
    }
#pragma unroll
    for (int i = 0; i < kFewTokens; ++i) {
      if (i >= m) break;
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) sums[i] += __shfl_xor_sync(kAllLanes, sums[i], distance);
      if (lane == 0) parts[warp * kFewTokens + i] = sums[i];
    }
    join_team(team);
    if (thread < m) {
      float sum = 0.0F;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += parts[w * kFewTokens + thread];
      static_cast<T*>(work.asked.u)[thread * work.asked.ranks + rank] = from_float<T>(sum);
      __threadfence();
    }
    join_team(team);
    if (thread == 0) atomicAdd(work.asked.counters, 1U);
  }
}

template <class T>
__global__ void __launch_bounds__(kFewThreads, 1) few_rows(const __grid_constant__ Work work) {
  extern __shared__ __align__(128) unsigned char shared[];
  unsigned char* const table = shared;
  float* const map = reinterpret_cast<float*>(shared + 256 * kEntry);
  const int lane = static_cast<int>(threadIdx.x % 32U), team = static_cast<int>(threadIdx.x) / kThreads;
  const int thread = static_cast<int>(threadIdx.x) % kThreads, warp = thread / 32;
  const int g = lane / 4, t = lane % 4;
  float* const parts = map + 256 + team * 2 * kFewParts;
  unsigned char* const ring =
      shared + 256 * kEntry + 1024 + kTeams * 2 * kFewParts * 4 + (team * kWarps + warp) * kFewRing * kStageBytes;
  const int stages = static_cast<int>(work.asked.k / kStage), m = static_cast<int>(work.asked.m);
  const int splits = static_cast<int>(work.splits), strips_each = static_cast<int>(work.strips_each), part = warp & (splits - 1);
  const int own_of_tile = warp / splits;
  const int64_t strips = work.first_strip[work.asked.count], tiles = work.tiles;
  const int64_t first_tile = static_cast<int64_t>(blockIdx.x) * kTeams + team, step = static_cast<int64_t>(gridDim.x) * kTeams;

  Asking asking{.tile = first_tile, .stage = part, .packed = nullptr, .scales = nullptr, .rows = {}, .scale = 0};
  const auto strip_of = [&](int64_t tile) { return tile * strips_each + own_of_tile; };
  const auto is_there = [&] { return asking.tile < tiles && strip_of(asking.tile) < strips && asking.stage < stages; };
  if (is_there()) aim(work, asking, strip_of(asking.tile), lane);
  const auto advance = [&] {
    asking.stage += splits;
    if (asking.stage < stages) return;
    asking.stage = part;
    asking.tile += step;
    if (is_there()) aim(work, asking, strip_of(asking.tile), lane);
  };
  for (int i = 0; i < kFewRing - 1; ++i) {
    ask_few(work, asking, is_there(), ring + i * kStageBytes, lane);
    if (part < stages) advance();
  }
  fill_wide<T>(table, work.nf4);
  for (unsigned i = threadIdx.x; i < 256U; i += kFewThreads) map[i] = __ldg(kDeviceSignedMap.values + i);
  wait_for_earlier_kernels();
  __syncthreads();
  bool has_u = work.asked.ranks == 0;
  if (!has_u) form_u<T>(work, parts, step - 1 - first_tile, step, team, thread);  // those without a tile first

  const T* const x = static_cast<const T*>(work.asked.x) + min(g, m - 1) * work.asked.x_stride + t * 16;
  const uint32_t lane_bytes = static_cast<uint32_t>(lane) * 4U;
  int slot = 0, free_slot = kFewRing - 1, turn = 0;
  for (int64_t tile = first_tile; tile < tiles; tile += step, turn ^= 1) {
    const int64_t strip = strip_of(tile);
    float sums[4] = {};
    if (strip < strips) {
      const float offset = work.nested ? __ldg(work.asked.weights[weight_of(work, strip)].nested_offset) : 0.0F;
      for (int stage = part; stage < stages; stage += splits) {
        uint4 x_low[4], x_high[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const auto* const from = reinterpret_cast<const uint4*>(x + stage * kStage + i * kBlock);
          x_low[i] = __ldg(from);
          x_high[i] = __ldg(from + 1);
        }
        wait_groups<kFewRing - 2>();
        __syncwarp();
        ask_few(work, asking, is_there(), ring + free_slot * kStageBytes, lane);
        advance();
        free_slot = free_slot + 1 == kFewRing ? 0 : free_slot + 1;
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
          const unsigned char* const place = here + g * (kStage / 2) + (i ^ (g & 3)) * 32 + t * 8;
          wide_pairs(table, *reinterpret_cast<const uint2*>(place), lane_bytes, a);
          wide_pairs(table, *reinterpret_cast<const uint2*>(place + 8 * (kStage / 2)), lane_bytes, b);
          multiply_block<T>(sums, a, b, x_low[i], x_high[i], scales[0][i], scales[1][i]);
        }
      }
    }
    // [warp][token][row], in two places by turns: what is read of one tile is not yet written by the next.
    float* const all = parts + turn * kFewParts;
#pragma unroll
    for (int i = 0; i < 4; ++i) all[(warp * kFewTokens + t * 2 + i % 2) * kStrip + i / 2 * 8 + g] = sums[i];
    if (!has_u && thread == 0) {
      unsigned formed = 0;
      do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(formed) : "l"(work.asked.counters) : "memory");
      while (formed < work.asked.ranks);
    }
    has_u = true;
    join_team(team);
    for (int out = thread; out < strips_each * m * kStrip; out += kThreads) {
      const int row = out % kStrip, token = out / kStrip % m, own_strip = out / kStrip / m;
      const int64_t of = tile * strips_each + own_strip;
      if (of >= strips) continue;
      const int own = weight_of(work, of);
      const GroupWeight& weight = work.asked.weights[own];
      const int64_t own_row = (of - work.first_strip[own]) * kStrip + row, column = work.first_row[own] + own_row;
      if (own_row >= weight.n) continue;
      float sum = added<T>(work, weight, token, own_row, column);
      for (int w = 0; w < splits; ++w) sum += all[((own_strip * splits + w) * kFewTokens + token) * kStrip + row];
      static_cast<T*>(work.asked.y)[token * work.asked.y_stride + column] = from_float<T>(sum);
    }
  }
  wait_groups<0>();
  if (work.asked.ranks == 0) return;
  join_team(team);  // nobody reads u any more: the last team leaves the counters as they were
  if (thread == 0 && atomicAdd(work.asked.counters + 1, 1U) == gridDim.x * kTeams - 1) {
    work.asked.counters[0] = 0;
    work.asked.counters[1] = 0;
  }
}

// --- up to 128 rows of x

constexpr int kHigh = 256, kDeep = 128;  // of a CTA: rows of W; k of a stage
constexpr int kHighCodes = kHigh * kDeep / 2;
/// Pairs of floats, of which sixteen lanes read at a time: [byte][lane % 16].
constexpr int kFloatTable = 256 * 16 * 8;

template <int kTokenTiles>
struct High {
  static constexpr int kTokens = 8 * kTokenTiles, kX = kTokens * kDeep * 2, kBytesEach = kHighCodes + kX;
  static constexpr int kCtas = kTokenTiles <= 8 ? 2 : 1;  ///< Of a multiprocessor.
  static constexpr int kRing = kTokenTiles <= 4 ? 3 : kTokenTiles <= 8 ? 2 : 3;
  static constexpr int kBytes = kFloatTable + 1024 + kRing * kBytesEach;
};

__device__ __forceinline__ void fill_floats(unsigned char* table, bool nf4) {
  const unsigned lane = threadIdx.x & 31U;
  const float entry = __ldg((nf4 ? kDeviceNf4 : kDeviceFp4).values + (lane & 15U));
  for (unsigned byte = threadIdx.x; byte < 256U; byte += blockDim.x) {
    const float first = __shfl_sync(kAllLanes, entry, static_cast<int>(byte >> 4U));
    const float second = __shfl_sync(kAllLanes, entry, static_cast<int>(byte & 15U));
#pragma unroll
    for (unsigned i = 0; i < 8; ++i)
      *reinterpret_cast<float4*>(table + byte * 128U + ((i + lane) & 7U) * 16U) = make_float4(first, second, first, second);
  }
}
/// A byte's two elements, as a dequantized weight has them: scaled in fp32, rounded once.
template <class T, int kByte>
__device__ __forceinline__ uint32_t scaled_pair(const unsigned char* table, uint32_t word, uint32_t lane_bytes, float scale) {
  const uint32_t place = kByte == 0 ? word << 7U : word >> (8 * kByte - 7);
  const float2 pair = *reinterpret_cast<const float2*>(table + ((place & 0x7F80U) | lane_bytes));
  return pack_pair<T>(__fmul_rn(pair.x, scale), __fmul_rn(pair.y, scale));
}

/// What a thread copies of a stage: 16 bytes each of every 64th row of codes, and of every 16th row of x. Rows beyond the end are not copied: what
/// stands in their place changes results alone that nobody stores.
struct Copying {
  const unsigned char *codes, *x;  ///< Of the stage that is asked for next.
  int rows, tokens;                ///< That follow the thread's first, and itself; not above 0: none.
};

__device__ __forceinline__ void ask_codes(const Copying& from, uint32_t row_bytes, bool is_there, unsigned char* to) {
  if (!is_there) return;
  const int row = static_cast<int>(threadIdx.x) / 4, part = static_cast<int>(threadIdx.x) % 4;
  unsigned char* const place = to + row * (kDeep / 2) + ((part / 2) ^ ((row >> 1) & 1)) * 32 + (part % 2) * 16;
#pragma unroll
  for (int q = 0; q < kHigh * 4 / kThreads; ++q)
    if (q * 64 < from.rows) copy_async<16>(place + q * 64 * (kDeep / 2), from.codes + static_cast<size_t>(q * 64 * row_bytes));
}
template <int kTokenTiles>
__device__ __forceinline__ void ask_x(const Copying& from, uint32_t row_bytes, bool is_there, unsigned char* to) {
  if (is_there) {
    const int token = static_cast<int>(threadIdx.x) / 16, part = static_cast<int>(threadIdx.x) % 16;
    unsigned char* const place = to + kHighCodes + token * (kDeep * 2) + (part ^ (token & 1)) * 16;
#pragma unroll
    for (int q = 0; q < kTokenTiles * 8 * 16 / kThreads; ++q)
      if (q * 16 < from.tokens) copy_async<16>(place + q * 16 * (kDeep * 2), from.x + static_cast<size_t>(q * 16 * row_bytes));
  }
  end_group();
}

/// scaling · B·uᵀ is one more product, of the first part of k.
template <class T, int kTokenTiles>
__device__ __forceinline__ void add_adapter(const Work& work, const GroupWeight& weight, int64_t row0, int g, int t,
                                            float (&sums)[2][kTokenTiles][4]) {
  const auto pair_at = [](const T* row, int64_t r, int64_t rank) {
    const unsigned low = r < rank ? *reinterpret_cast<const unsigned short*>(row + r) : 0U;
    const unsigned high = r + 1 < rank ? *reinterpret_cast<const unsigned short*>(row + r + 1) : 0U;
    return low | (high << 16U);
  };
  for (int64_t r0 = 0; r0 < weight.rank; r0 += 16) {
    uint32_t b[2][4];
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const T* const row = static_cast<const T*>(weight.b) + min(row0 + tile * 16 + half * 8 + g, weight.n - 1) * weight.rank;
        b[tile][half] = pair_at(row, r0 + t * 2, weight.rank);
        b[tile][2 + half] = pair_at(row, r0 + t * 2 + 8, weight.rank);
      }
#pragma unroll
    for (int token = 0; token < kTokenTiles; ++token) {
      const T* const u = static_cast<const T*>(work.asked.u) + weight.u_column +
                         min(static_cast<int64_t>(token * 8 + g), work.asked.m - 1) * work.asked.ranks;
      const uint32_t first = pair_at(u, r0 + t * 2, weight.rank), second = pair_at(u, r0 + t * 2 + 8, weight.rank);
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        float part[4] = {};
        multiply<T>(part, b[tile][0], b[tile][1], b[tile][2], b[tile][3], first, second);
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[tile][token][i] += part[i] * weight.scaling;
      }
    }
  }
}

template <class T, int kTokenTiles>
__global__ void __launch_bounds__(kThreads, High<kTokenTiles>::kCtas) more_rows(const __grid_constant__ Work work) {
  using Shape = High<kTokenTiles>;
  extern __shared__ __align__(128) unsigned char shared[];
  unsigned char* const table = shared;
  float* const map = reinterpret_cast<float*>(shared + kFloatTable);
  unsigned char* const ring = shared + kFloatTable + 1024;
  const int lane = static_cast<int>(threadIdx.x % 32U), warp = static_cast<int>(threadIdx.x / 32U);
  const int g = lane / 4, t = lane % 4;
  const int own = weight_of(work, blockIdx.x);
  const GroupWeight& weight = work.asked.weights[own];
  const int64_t row0 = (static_cast<int64_t>(blockIdx.x) - work.first_strip[own]) * kHigh;
  const int64_t stages = work.asked.k / kDeep, share = (stages + work.splits - 1) / work.splits;
  const int64_t begin = blockIdx.y * share, end = min(begin + share, stages);

  const auto row_bytes = static_cast<uint32_t>(work.asked.k / 2), x_bytes = static_cast<uint32_t>(work.asked.x_stride * 2);
  Copying ahead{.codes = weight.packed + (row0 + threadIdx.x / 4) * row_bytes + begin * (kDeep / 2) + threadIdx.x % 4 * 16,
                .x = static_cast<const unsigned char*>(work.asked.x) + static_cast<int64_t>(threadIdx.x / 16) * x_bytes +
                     begin * (kDeep * 2) + threadIdx.x % 16 * 16,
                .rows = static_cast<int>(min(weight.n - row0, static_cast<int64_t>(kHigh))) - static_cast<int>(threadIdx.x / 4),
                .tokens = static_cast<int>(work.asked.m) - static_cast<int>(threadIdx.x / 16)};
  const auto count = static_cast<int>(end - begin);
#pragma unroll
  for (int i = 0; i < Shape::kRing - 1; ++i) {
    ask_codes(ahead, row_bytes, i < count, ring + i * Shape::kBytesEach);
    ahead.codes += kDeep / 2;
  }
  // Of a lane's four rows of W: where their scales begin, in blocks.
  uint32_t scale_rows[2][2];
#pragma unroll
  for (int tile = 0; tile < 2; ++tile)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      scale_rows[tile][half] =
          static_cast<uint32_t>(min(row0 + warp * 32 + tile * 16 + half * 8 + g, weight.n - 1) * (work.asked.k / kBlock));
  const uint32_t last_stage = static_cast<uint32_t>(stages) - 1, nested_block = static_cast<uint32_t>(work.nested_block.value);
  const int shift = work.nested_block.shift;
  /// What makes the scales of a stage: two codes and what they multiply; or two floats.
  const auto scales_of = [&](int64_t stage, uint32_t(&codes)[2][2], float(&outer)[2][2]) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t scale = scale_rows[tile][half] + min(static_cast<uint32_t>(stage), last_stage) * 2;
        if (work.nested) {
          codes[tile][half] = __ldg(reinterpret_cast<const uint16_t*>(static_cast<const uint8_t*>(weight.absmax) + scale));
          outer[tile][half] = __ldg(weight.nested_absmax + (shift >= 0 ? scale >> shift : scale / nested_block));
        } else {
          const float2 both = __ldg(reinterpret_cast<const float2*>(static_cast<const float*>(weight.absmax) + scale));
          outer[tile][half] = both.x, codes[tile][half] = __float_as_uint(both.y);
        }
      }
  };
  uint32_t codes[2][2];
  float outer[2][2];
  scales_of(begin, codes, outer);
  const float offset = work.nested ? __ldg(weight.nested_offset) : 0.0F;
  fill_floats(table, work.nf4);
  for (unsigned i = threadIdx.x; i < 256U; i += kThreads) map[i] = __ldg(kDeviceSignedMap.values + i);
  wait_for_earlier_kernels();
#pragma unroll
  for (int i = 0; i < Shape::kRing - 1; ++i) {
    ask_x<kTokenTiles>(ahead, x_bytes, i < count, ring + i * Shape::kBytesEach);
    ahead.x += kDeep * 2;
  }

  float sums[2][kTokenTiles][4] = {};
  const uint32_t lane_bytes = static_cast<uint32_t>(lane & 15) * 8U;
  int slot = 0, asked = Shape::kRing - 1;
  for (int stage = 0; stage < count; ++stage) {
    wait_groups<Shape::kRing - 2>();
    __syncthreads();  // of all threads' copies; and the slot that is asked for next was read by all
    ask_codes(ahead, row_bytes, stage + Shape::kRing - 1 < count, ring + asked * Shape::kBytesEach);
    ask_x<kTokenTiles>(ahead, x_bytes, stage + Shape::kRing - 1 < count, ring + asked * Shape::kBytesEach);
    ahead.codes += kDeep / 2;
    ahead.x += kDeep * 2;
    asked = asked + 1 == Shape::kRing ? 0 : asked + 1;
    float scales[2][2][2];
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t both = codes[tile][half];
        const float of = outer[tile][half];
        scales[0][tile][half] = work.nested ? decode_scale_rn(map[both & 255U], of, offset) : of;
        scales[1][tile][half] = work.nested ? decode_scale_rn(map[both >> 8U], of, offset) : __uint_as_float(both);
      }
    scales_of(begin + stage + 1, codes, outer);
    const unsigned char* const here = ring + slot * Shape::kBytesEach;
    slot = slot + 1 == Shape::kRing ? 0 : slot + 1;
#pragma unroll
    for (int step = 0; step < 4; ++step) {  // 32 of the stage's k
      const int block = step / 2, half_block = step % 2;
      uint32_t pairs[2][2][4];
#pragma unroll
      for (int tile = 0; tile < 2; ++tile)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = warp * 32 + tile * 16 + half * 8 + g;
          const int place = row * (kDeep / 2) + (block ^ ((row >> 1) & 1)) * 32 + t * 8 + half_block * 4;
          const uint32_t word = *reinterpret_cast<const uint32_t*>(here + place);
          const float scale = scales[block][tile][half];
          pairs[tile][half][0] = scaled_pair<T, 0>(table, word, lane_bytes, scale);
          pairs[tile][half][1] = scaled_pair<T, 1>(table, word, lane_bytes, scale);
          pairs[tile][half][2] = scaled_pair<T, 2>(table, word, lane_bytes, scale);
          pairs[tile][half][3] = scaled_pair<T, 3>(table, word, lane_bytes, scale);
        }
#pragma unroll
      for (int token = 0; token < kTokenTiles; ++token) {
        const int part = block * 8 + t * 2 + half_block;
        const uint4 x = *reinterpret_cast<const uint4*>(here + kHighCodes + (token * 8 + g) * (kDeep * 2) + (part ^ (g & 1)) * 16);
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          const auto &a = pairs[tile][0], &b = pairs[tile][1];
          multiply<T>(sums[tile][token], a[0], b[0], a[1], b[1], x.x, x.y);
          multiply<T>(sums[tile][token], a[2], b[2], a[3], b[3], x.z, x.w);
        }
      }
    }
  }
  wait_groups<0>();
  if (blockIdx.y == 0 && weight.b != nullptr) add_adapter<T, kTokenTiles>(work, weight, row0 + warp * 32, g, t, sums);

  // Of one part the result; of several [part][token][row of all weights].
  const int64_t width = work.first_row[work.asked.count], column0 = work.first_row[own];
  float* const partial = work.asked.partial + static_cast<int64_t>(blockIdx.y) * work.asked.m * width + column0;
  T* const y = static_cast<T*>(work.asked.y) + column0;
  const T* const bias = work.asked.bias == nullptr ? nullptr : static_cast<const T*>(work.asked.bias) + column0;
#pragma unroll
  for (int tile = 0; tile < 2; ++tile)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row = row0 + warp * 32 + tile * 16 + half * 8 + g;
      if (row >= weight.n) continue;
      const float added_bias = work.splits == 1 && bias != nullptr ? to_float(bias[row]) : 0.0F;
#pragma unroll
      for (int token = 0; token < kTokenTiles; ++token)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int64_t at = token * 8 + t * 2 + i;
          if (at >= work.asked.m) continue;
          const float value = sums[tile][token][half * 2 + i];
          if (work.splits == 1) y[at * work.asked.y_stride + row] = from_float<T>(value + added_bias);
          else partial[at * width + row] = value;
        }
    }
}

/// A thread has four columns of one row of y.
template <class T>
__global__ void __launch_bounds__(256) finish(const __grid_constant__ Work work) {
  const int64_t width = work.first_row[work.asked.count], column = (static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x) * 4;
  const int64_t row = blockIdx.y;
  wait_for_earlier_kernels();
  if (column >= width) return;
  const bool is_whole = column + 4 <= width && width % 4 == 0;
  float sums[4] = {};
  const float* const from = work.asked.partial + row * width + column;
#pragma unroll 4
  for (int64_t s = 0; s < work.splits; ++s) {
    if (is_whole) {
      const float4 part = *reinterpret_cast<const float4*>(from + s * work.asked.m * width);
      sums[0] += part.x, sums[1] += part.y, sums[2] += part.z, sums[3] += part.w;
    } else {
      for (int i = 0; i < 4 && column + i < width; ++i) sums[i] += from[s * work.asked.m * width + i];
    }
  }
  T* const y = static_cast<T*>(work.asked.y) + row * work.asked.y_stride + column;
  for (int i = 0; i < 4 && column + i < width; ++i) {
    const float bias = work.asked.bias == nullptr ? 0.0F : to_float(static_cast<const T*>(work.asked.bias)[column + i]);
    y[i] = from_float<T>(sums[i] + bias);
  }
}

Work work_of(const GemmFourBitGroup& asked, int64_t height) {
  Work work{.asked = asked,
            .nested_block = make_divisor(asked.nested_block_size),
            .nested = asked.weights[0].nested_absmax != nullptr,
            .nf4 = asked.quant_type == QuantType::kNf4,
            .first_strip = {},
            .first_row = {},
            .splits = 1,
            .strips_each = 0,
            .tiles = 0,
            .wide_ranks = asked.ranks % 8 == 0 && aligned_to(asked.u, 16)};
  for (int i = 0; i < asked.count; ++i) {
    work.first_strip[i + 1] = work.first_strip[i] + (asked.weights[i].n + height - 1) / height;
    work.first_row[i + 1] = work.first_row[i] + asked.weights[i].n;
    work.wide_ranks = work.wide_ranks && asked.weights[i].rank % 8 == 0 && asked.weights[i].u_column % 8 == 0 &&
                      aligned_to(asked.weights[i].b, 16);
  }
  return work;
}

int64_t splits_of(const Work& work, int multiprocessors) {
  const int64_t strips = work.first_strip[work.asked.count], stages = work.asked.k / kDeep, ctas = work.asked.m <= 64 ? 2 : 1;
  return std::clamp<int64_t>(ctas * multiprocessors / std::max<int64_t>(1, strips), 1, std::max<int64_t>(1, stages / 2));
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
  Work work = work_of(asked, kStrip);
  // As few warps a strip as leave each team something to do.
  const int64_t strips = work.first_strip[asked.count];
  work.splits = kWarps;
  while (work.splits > 1 && strips * work.splits / 2 >= kWarps * kTeams * multiprocessors * 7 / 10) work.splits /= 2;
  work.strips_each = kWarps / work.splits;
  work.tiles = (strips + work.strips_each - 1) / work.strips_each;
  const int64_t teams = work.tiles + asked.ranks;
  const auto ctas = static_cast<unsigned>(std::min<int64_t>((teams + kTeams - 1) / kTeams, multiprocessors));
  return launch_early<few_rows<T>>(dim3(ctas), kFewThreads, kFewBytes, stream, work);
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
  if (work.splits == 1) return cudaSuccess;
  const dim3 rest(static_cast<unsigned>((work.first_row[asked.count] + 1023) / 1024), static_cast<unsigned>(asked.m));
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

bool forms_u(int64_t m) { return m <= kFewTokens; }

bool has_gemm_4bit_group(int64_t m, int64_t k, int64_t block_size, int64_t nested_block_size, Float type, int arch) {
  return arch >= 90 && type != Float::kFloat32 && m >= 1 && m <= 128 && k >= kStage && k % kStage == 0 && block_size == kBlock &&
         nested_block_size % 4 == 0;
}

int64_t gemm_4bit_group_floats(const GemmFourBitGroup& asked, int multiprocessors) {
  if (asked.m <= kFewTokens) return 0;
  const Work work = work_of(asked, kHigh);
  const int64_t splits = splits_of(work, multiprocessors);
  return splits == 1 ? 0 : splits * asked.m * work.first_row[asked.count];
}

cudaError_t gemm_4bit_group(const GemmFourBitGroup& work, int multiprocessors, Stream stream) {
  return work.type == Float::kFloat16 ? launch<__half>(work, multiprocessors, stream)
                                      : launch<__nv_bfloat16>(work, multiprocessors, stream);
}

}  // namespace qlorapp::cuda
