// SPDX-License-Identifier: Apache-2.0
/// Up to 8 rows of x (gemm_4bit_group.hpp). A warp has 16 rows of W and a part of k; teams of eight warps stay and take strips of rows in turn.
///
/// cp.async brings codes from memory into a ring of shared memory while earlier ones are multiplied, and the first of them are asked for before the
/// kernel in front has ended, which cannot have written them. Operands are formed as in gemm_4bit.cu.
///
/// The first teams form u = x·Aᵀ before their strips; the GPU starts them first, so none of the others waits for one that has not begun. A team
/// waits for u when its first sums are there.
#include <algorithm>
#include <atomic>
#include <cstdint>

#include "few_rows.cuh"

namespace qlorapp::cuda {
namespace {

/// scaling · u·Bᵀ + bias of one element.
template <class T>
__device__ __forceinline__ float added(const Work& work, const GroupWeight& weight, int64_t token, int64_t row, int64_t column) {
  float sum = 0.0F;
  if (weight.b != nullptr)
    sum = weight.scaling * low_rank_sum(static_cast<const T*>(work.asked.u) + token * work.asked.ranks + weight.u_column,
                                        static_cast<const T*>(weight.b) + row * weight.rank, weight.rank, work.wide_ranks);
  return work.asked.bias == nullptr ? sum : sum + to_float(static_cast<const T*>(work.asked.bias)[column]);
}

constexpr int kTeams = 2, kFewThreads = kTeams * kThreads;  // teams of eight warps, which share the table alone
constexpr int kFewRing = 3;
constexpr int kFewParts = kWarps * kFewTokens * kStrip;
constexpr int kOfTeam = kWarps * kFewRing * kStageBytes + 2 * kFewParts * 4;  // bytes: rings, then what its warps tell each other
static_assert(kTeams == 2 && kOfTeam + 1024 <= kInFront);                     // the first team's are in front of the table
constexpr int kFewBytes = kInFront + kWideTable + kOfTeam;

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
    unsigned char* const place = to + place_of_codes(lane);
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

__device__ __forceinline__ void join_team(int team) { meet<kThreads>(1 + team); }

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
  unsigned char* const table = shared + kInFront;
  float* const map = reinterpret_cast<float*>(shared + kOfTeam);
  const int lane = static_cast<int>(threadIdx.x % 32U), team = static_cast<int>(threadIdx.x) / kThreads;
  const int thread = static_cast<int>(threadIdx.x) % kThreads, warp = thread / 32;
  const int g = lane / 4, t = lane % 4;
  unsigned char* const of_team = shared + (team == 0 ? 0 : kInFront + kWideTable);
  unsigned char* const ring = of_team + warp * kFewRing * kStageBytes;
  float* const parts = reinterpret_cast<float*>(of_team + kWarps * kFewRing * kStageBytes);
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
  require_place(shared);
  fill_wide<T>(table, work.nf4);
  for (unsigned i = threadIdx.x; i < 256U; i += kFewThreads) map[i] = __ldg(kDeviceSignedMap.values + i);
  wait_for_earlier_kernels();
  __syncthreads();
  bool has_u = work.asked.ranks == 0;
  if (!has_u) form_u<T>(work, parts, first_tile, step, team, thread);

  const T* const x = static_cast<const T*>(work.asked.x) + min(g, m - 1) * work.asked.x_stride + t * 16;
  int slot = 0, free_slot = kFewRing - 1, turn = 0;
  for (int64_t tile = first_tile; tile < tiles; tile += step, turn ^= 1) {
    const int64_t strip = strip_of(tile);
    float sums[4] = {};
    if (strip < strips) {
      const float offset = work.nested ? __ldg(work.asked.weights[weight_of(work, strip)].nested_offset) : 0.0F;
      const float offsets[2] = {offset, offset};
      for (int stage = part; stage < stages; stage += splits) {
        const auto x_of = [&](int i) {
          const auto* const from = reinterpret_cast<const uint4*>(x + stage * kStage + i * kBlock);
          return BlockInput{__ldg(from), __ldg(from + 1)};
        };
        const BlockInput first = x_of(0);
        wait_groups<kFewRing - 2>();
        __syncwarp();
        ask_few(work, asking, is_there(), ring + free_slot * kStageBytes, lane);
        advance();
        free_slot = free_slot + 1 == kFewRing ? 0 : free_slot + 1;
        const unsigned char* const here = ring + slot * kStageBytes;
        slot = slot + 1 == kFewRing ? 0 : slot + 1;
        multiply_stage<T>(sums, here, first, x_of, map, lane, work.nested, offsets);
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

bool forms_u(const GemmFourBitGroup& work) { return work.m <= kFewTokens || goes_wide(work); }

bool has_gemm_4bit_group(int64_t m, int64_t k, int64_t block_size, int64_t nested_block_size, Float type, int arch,
                         int64_t shared_bytes, int64_t reserved_bytes) {
  return (m > kFewTokens || reserved_bytes == kSystem) && arch >= 90 && shared_bytes >= kMostShared && type != Float::kFloat32 &&
         m >= 1 && m <= 128 && k >= kStage && k % kStage == 0 && block_size == kBlock && nested_block_size % 4 == 0;
}

int64_t gemm_4bit_group_floats(const GemmFourBitGroup& work, int multiprocessors) {
  if (work.m <= kFewTokens) return 0;
  return goes_wide(work) ? wide_rows_floats(work, multiprocessors) : more_rows_floats(work, multiprocessors);
}

cudaError_t gemm_4bit_group(const GemmFourBitGroup& work, int multiprocessors, Stream stream) {
  if (work.m > kFewTokens)
    return goes_wide(work) ? multiply_wide_rows(work, multiprocessors, stream) : multiply_more_rows(work, multiprocessors, stream);
  return work.type == Float::kFloat16 ? launch_few<__half>(work, multiprocessors, stream)
                                      : launch_few<__nv_bfloat16>(work, multiprocessors, stream);
}

}  // namespace qlorapp::cuda
