// SPDX-License-Identifier: Apache-2.0
/// Up to 8 rows of x (gemm_4bit_group.hpp). A warp has 16 rows of W and a part of k; teams of eight warps stay and take strips of rows in turn.
///
/// cp.async brings codes from memory into a ring of shared memory while earlier ones are multiplied, and the first of them are asked for before the
/// kernel in front has ended, which cannot have written them. Operands are formed as in gemm_4bit.cu. Pieces of 32 bytes of a row of codes are
/// exchanged (by the row's last bits) so that lanes which read together read different banks.
///
/// The first teams form u = x·Aᵀ before their strips; the GPU starts them first, so none of the others waits for one that has not begun. A team
/// waits for u when its first sums are there.
#include <algorithm>
#include <atomic>
#include <cstdint>

#include "group_work.cuh"
#include "tensor_core.cuh"

namespace qlorapp::cuda {
namespace {

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

/// The stage that a warp copies next. In its strip of a tile these are part, part + splits and so on; then the team's next tile follows.
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
  if (!has_u) form_u<T>(work, parts, first_tile, step, team, thread);

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
  join_team(team);  // the team has read u; the last team sets the counters back to 0
  if (thread == 0 && atomicAdd(work.asked.counters + 1, 1U) == gridDim.x * kTeams - 1) {
    work.asked.counters[0] = 0;
    work.asked.counters[1] = 0;
  }
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
  const auto ctas = static_cast<unsigned>(std::min<int64_t>((work.tiles + kTeams - 1) / kTeams, multiprocessors));
  return launch_early<few_rows<T>>(dim3(ctas), kFewThreads, kFewBytes, stream, work);
}

}  // namespace

bool forms_u(int64_t m) { return m <= kFewTokens; }

bool has_gemm_4bit_group(int64_t m, int64_t k, int64_t block_size, int64_t nested_block_size, Float type, int arch) {
  return arch >= 90 && type != Float::kFloat32 && m >= 1 && m <= 128 && k >= kStage && k % kStage == 0 && block_size == kBlock &&
         nested_block_size % 4 == 0;
}

int64_t gemm_4bit_group_floats(const GemmFourBitGroup& work, int multiprocessors) {
  return forms_u(work.m) ? 0 : more_rows_floats(work, multiprocessors);
}

cudaError_t gemm_4bit_group(const GemmFourBitGroup& work, int multiprocessors, Stream stream) {
  if (!forms_u(work.m)) return multiply_more_rows(work, multiprocessors, stream);
  return work.type == Float::kFloat16 ? launch_few<__half>(work, multiprocessors, stream)
                                      : launch_few<__nv_bfloat16>(work, multiprocessors, stream);
}

}  // namespace qlorapp::cuda
