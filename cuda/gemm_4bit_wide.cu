// SPDX-License-Identifier: Apache-2.0
/// Up to 128 rows of x (gemm_4bit_group.hpp) on sm_90a: as gemm_4bit_more.cu, on the tensor cores of a warpgroup (wgmma), which read x in shared
/// memory and W in registers.
///
/// One CTA stays on each multiprocessor and has an even part of all k of all strips of 256 rows of W, one after the other. A strip that has several
/// CTAs gets their sums from a second kernel, in their order. A warpgroup has 64 rows of the strip and up to 64 rows of x.
///
/// A warp's lane reads 16 codes that follow each other, of which a product of 16 k wants four: so x is laid down in that order of k. The codes'
/// values are rounded to 16 bits, and the sums of 64 k are scaled in fp32, while the next 64 are looked up.
#include <algorithm>
#include <atomic>
#include <cstdint>

#include "few_rows.cuh"
#include "warpgroup.cuh"

namespace qlorapp::cuda {
namespace {

constexpr int kWideWarps = 16, kWideThreads = 32 * kWideWarps;
constexpr int kHeight = 256, kDeep = 128, kUnit = 256;  // of a CTA: rows of W; k of a stage; k whose scales are read at a time
constexpr int kDeepCodes = kHeight * kDeep / 2;
constexpr int kScales = kHeight * 16, kScaleRing = 4;
constexpr int kFinished = 4;  ///< Rows of x of a CTA of finish_wide().

template <int kTokens>
struct Wide {
  static constexpr int kTile =
      kTokens * kBlock * 2;  ///< x of 64 k: of a row 128 bytes, whose pieces of 16 are exchanged by the row's last bits.
  static constexpr int kX = kDeep / kBlock * kTile, kBytesEach = kDeepCodes + kX;
  static constexpr int kRing = kTokens <= 32 ? 5 : 4, kAhead = kRing - 2;
  static constexpr int kBytes = kWideTable + kRing * kBytesEach + kScaleRing * kScales + 1024 + 64;
};
static_assert(Wide<64>::kBytes <= 232448 && Wide<32>::kBytes <= 232448);  // of a multiprocessor of sm_90

/// Strips, of each of which the rows of x are taken `kTokens` at a time; and all k of them, in units.
struct Extent {
  uint32_t units, strips, tiles, total, ctas;

  __host__ __device__ Extent(const Work& work, int tokens, unsigned most_ctas)
      : units(static_cast<uint32_t>(work.asked.k / kUnit)),
        strips(static_cast<uint32_t>(work.first_strip[work.asked.count])),
        tiles(static_cast<uint32_t>((work.asked.m + tokens - 1) / tokens)),
        total(units * strips * tiles),
        ctas(most_ctas < total ? most_ctas : total) {}
  [[nodiscard]] __host__ __device__ uint32_t first_of(uint32_t cta) const { return total * cta / ctas; }
  [[nodiscard]] __host__ __device__ uint32_t cta_of(uint32_t unit) const { return ((unit + 1) * ctas - 1) / total; }
  /// Of a strip's rows of x: the first CTA that has a part, and how many have one.
  [[nodiscard]] __host__ __device__ uint32_t first_part(uint32_t strip_tile) const { return cta_of(strip_tile * units); }
  [[nodiscard]] __host__ __device__ uint32_t parts(uint32_t strip_tile) const {
    return cta_of((strip_tile + 1) * units - 1) - first_part(strip_tile) + 1;
  }
};

/// Bytes of x as lay_x() leaves it.
template <int kTokens>
__host__ __device__ int64_t laid_bytes(const Work& work) {
  return (work.asked.m + kTokens - 1) / kTokens * kTokens * work.asked.k * 2;
}
constexpr int kBesideThreads = 1024, kTileTokens = 16, kTileRanks = 8;  // of a CTA of what comes before the product

/// u = x·Aᵀ, 16 rows of 8 columns of it. The warps divide k among themselves.
template <class T>
__device__ __forceinline__ void form_u(const Work& work, int tile) {
  __shared__ float sums[kBesideThreads / 32][kTileTokens * kTileRanks];
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
  const auto rank_tiles = static_cast<int>((work.asked.ranks + kTileRanks - 1) / kTileRanks);
  const int64_t token0 = tile / rank_tiles * kTileTokens, rank0 = tile % rank_tiles * kTileRanks;
  const auto* const x = static_cast<const unsigned char*>(work.asked.x) + t * 32;
  const unsigned char* const low = x + min(token0 + g, work.asked.m - 1) * work.asked.x_stride * 2;
  const unsigned char* const high = x + min(token0 + g + 8, work.asked.m - 1) * work.asked.x_stride * 2;
  const unsigned char* const a =
      static_cast<const unsigned char*>(work.asked.a) + min(rank0 + g, work.asked.ranks - 1) * work.asked.k * 2 + t * 32;
  float sum[4] = {};
#pragma unroll 2
  for (int64_t block = warp; block < work.asked.k / kBlock; block += kBesideThreads / 32) {
    const auto words_at = [&](const unsigned char* row, int half) {
      return *reinterpret_cast<const uint4*>(row + block * (kBlock * 2) + half * 16);
    };
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 first = words_at(low, half), second = words_at(high, half), of_a = words_at(a, half);
      multiply<T>(sum, first.x, second.x, first.y, second.y, of_a.x, of_a.y);
      multiply<T>(sum, first.z, second.z, first.w, second.w, of_a.z, of_a.w);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[warp][(g + i / 2 * 8) * kTileRanks + t * 2 + i % 2] = sum[i];
  __syncthreads();
  if (thread >= kTileTokens * kTileRanks) return;
  float all = 0.0F;
#pragma unroll
  for (int w = 0; w < kBesideThreads / 32; ++w) all += sums[w][thread];
  const int64_t token = token0 + thread / kTileRanks, rank = rank0 + thread % kTileRanks;
  if (token < work.asked.m && rank < work.asked.ranks)
    static_cast<T*>(work.asked.u)[token * work.asked.ranks + rank] = from_float<T>(all);
}

/// 16 bytes of x as stages take it: of kTokens rows, of 64 k, a Wide::kTile in the order of k in which W is multiplied. Rows that x has not are 0.
template <int kTokens>
__device__ __forceinline__ void lay_x(const Work& work, int64_t at) {
  const int64_t blocks = work.asked.k / kBlock, tile_block = at / (kTokens * 8);
  const int in_tile = static_cast<int>(at % (kTokens * 8)), row = in_tile / 8, piece = (in_tile % 8) ^ (row % 8);
  const int64_t token = tile_block / blocks * kTokens + row;
  if (at >= laid_bytes<kTokens>(work) / 16) return;
  uint4 words = make_uint4(0, 0, 0, 0);
  if (token < work.asked.m) {
    const auto* const from = reinterpret_cast<const uint32_t*>(static_cast<const unsigned char*>(work.asked.x) +
                                                               (token * work.asked.x_stride + tile_block % blocks * kBlock) * 2) +
                             piece;
    words = make_uint4(from[0], from[8], from[16], from[24]);
  }
  reinterpret_cast<uint4*>(work.laid)[at] = words;
}

/// The first CTAs form u, the others lay x down for the product.
template <class T, int kTokens>
__global__ void __launch_bounds__(kBesideThreads) prepare_wide(const __grid_constant__ Work work) {
  const auto of_u =
      static_cast<int64_t>((work.asked.m + kTileTokens - 1) / kTileTokens * ((work.asked.ranks + kTileRanks - 1) / kTileRanks));
  wait_for_earlier_kernels();
  if (blockIdx.x < of_u) form_u<T>(work, static_cast<int>(blockIdx.x));
  else lay_x<kTokens>(work, (blockIdx.x - of_u) * kBesideThreads + threadIdx.x);
}

/// The stage that a thread copies next.
struct Asking {
  int left;                     ///< Stages of the CTA's part.
  uint32_t deep, strip_tile;    ///< The stage's number in its strip, and which strip that is.
  bool has_first, has_second;   ///< Whether W has the thread's rows of codes.
  bool has_scale;               ///< Whether the thread copies scales.
  uint32_t scale;               ///< The first block of its row of scales, of the unit.
  const unsigned char* scales;  ///< Of the weight, those that the thread reads.
  const unsigned char* codes;   ///< The thread's 16 bytes of its first row, of the stage.
  const unsigned char* x;       ///< Of the stage.
};

/// A stage of a strip. Not inlined: registers are for the loop.
template <int kTokens>
__device__ __noinline__ Asking asking_of(const Work& work, uint32_t strip_tile, uint32_t deep, int left) {
  const Extent extent(work, kTokens, 1);
  const int thread = static_cast<int>(threadIdx.x), row = thread / 4, scale_row = thread % kHeight;
  const uint32_t strip = strip_tile / extent.tiles;
  const int own = weight_of(work, strip);
  const GroupWeight& weight = work.asked.weights[own];
  const int64_t row0 = (static_cast<int64_t>(strip) - work.first_strip[own]) * kHeight, rows = weight.n - row0;
  Asking asking;
  asking.left = left, asking.deep = deep, asking.strip_tile = strip_tile;
  asking.has_first = row < rows, asking.has_second = row + kHeight / 2 < rows;
  asking.has_scale = scale_row < rows && (thread < kHeight || work.nested);
  asking.scale = static_cast<uint32_t>((row0 + scale_row) * (work.asked.k / kBlock)) + deep * (kDeep / kBlock);
  asking.scales = static_cast<const unsigned char*>(thread < kHeight ? weight.absmax : weight.nested_absmax);
  asking.codes = weight.packed + (row0 + row) * (work.asked.k / 2) + deep * (kDeep / 2) + thread % 4 * 16;
  asking.x =
      work.laid + (static_cast<int64_t>(strip_tile - strip * extent.tiles) * (work.asked.k / kDeep) + deep) * Wide<kTokens>::kX;
  return asking;
}

/// @param to  in shared memory.
template <int kBytes>
__device__ __forceinline__ void copy_if(bool wanted, uint32_t to, const void* from) {
  if constexpr (kBytes == 16)
    asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p cp.async.cg.shared.global [%0], [%1], 16;}" ::"r"(to), "l"(from),
                 "r"(static_cast<int>(wanted)));
  else
    asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p cp.async.ca.shared.global [%0], [%1], 4;}" ::"r"(to), "l"(from),
                 "r"(static_cast<int>(wanted)));
}

/// Codes of a stage, and with every second one the scales of both.
/// @param to  where the thread's first 16 bytes go.  @param scale_ring  where its scales of the first slot go.
__device__ __forceinline__ void ask_codes(const Work& work, const Asking& asking, uint32_t to, uint32_t scale_ring) {
  if (asking.left > 0) {
    copy_if<16>(asking.has_first, to, asking.codes);
    copy_if<16>(asking.has_second, to + kDeepCodes / 2, asking.codes + static_cast<uint32_t>(work.asked.k) * (kHeight / 4));
    if (asking.deep % 2 == 0) {
      const uint32_t own = scale_ring + static_cast<uint32_t>(asking.left) / 2 % kScaleRing * kScales;  // as the loop counts units
      const bool is_inner = work.nested && threadIdx.x < kHeight;
      const uint32_t block = threadIdx.x < kHeight ? asking.scale : asking.scale >> work.nested_block.shift;
      const unsigned char* const from = asking.scales + (is_inner ? block : static_cast<int64_t>(block) * 4);
      if (work.nested) copy_if<4>(asking.has_scale, own, from);
      else copy_if<16>(asking.has_scale, own, from);
    }
  }
  end_group();
}
template <int kTokens>
__device__ __forceinline__ void ask_x(const Asking& asking, unsigned char* to, uint64_t* arrival) {
  if (asking.left > 0) copy_bytes(to + kDeepCodes, asking.x, Wide<kTokens>::kX, arrival);
}
template <int kTokens>
__device__ __forceinline__ void advance(const Work& work, Asking& asking) {
  --asking.left;
  asking.codes += kDeep / 2, asking.x += Wide<kTokens>::kX, asking.scale += kDeep / kBlock;
  if (++asking.deep == static_cast<uint32_t>(work.asked.k / kDeep) && asking.left > 0)
    asking = asking_of<kTokens>(work, asking.strip_tile + 1, 0, asking.left);
}

/// sums += scaling · B·uᵀ of a warp's 16 rows of W: one more product.
template <class T, int kTiles>
__device__ __forceinline__ void add_adapter(const Work& work, const GroupWeight& weight, int64_t row, int64_t token0, int t, int g,
                                            float (&sums)[kTiles][4]) {
  const auto pair_at = [&](const T* from, int64_t r) {
    if (work.wide_ranks) return r < weight.rank ? *reinterpret_cast<const uint32_t*>(from + r) : 0U;
    const unsigned low = r < weight.rank ? *reinterpret_cast<const unsigned short*>(from + r) : 0U;
    const unsigned high = r + 1 < weight.rank ? *reinterpret_cast<const unsigned short*>(from + r + 1) : 0U;
    return low | (high << 16U);
  };
  const T* const b = static_cast<const T*>(weight.b) + min(row, weight.n - 1) * weight.rank;
  const T* const b_after = static_cast<const T*>(weight.b) + min(row + 8, weight.n - 1) * weight.rank;
  const T* const u = static_cast<const T*>(work.asked.u) + weight.u_column;
#pragma unroll 1
  for (int64_t r = t * 2; r < weight.rank + t * 2; r += 16) {
    const uint32_t of_b[4] = {pair_at(b, r), pair_at(b_after, r), pair_at(b, r + 8), pair_at(b_after, r + 8)};
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const T* const own = u + min(token0 + j * 8 + g, work.asked.m - 1) * work.asked.ranks;
      float part[4] = {};
      multiply<T>(part, of_b[0], of_b[1], of_b[2], of_b[3], pair_at(own, r), pair_at(own, r + 8));
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[j][i] += part[i] * weight.scaling;
    }
  }
}

template <class T, int kTokens>
__global__ void __launch_bounds__(kWideThreads, 1) wide_rows(const __grid_constant__ Work work) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // elsewhere it is never launched
  using Shape = Wide<kTokens>;
  constexpr int kTiles = kTokens / 8;
  extern __shared__ __align__(1024) unsigned char shared[];
  unsigned char* const table = shared;
  unsigned char* const ring = shared + kWideTable;
  unsigned char* const scale_ring = ring + Shape::kRing * Shape::kBytesEach;
  float* const map = reinterpret_cast<float*>(scale_ring + kScaleRing * kScales);
  auto* const arrivals = reinterpret_cast<uint64_t*>(map + 256);  // of x, in each slot of the ring
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, g = lane / 4, t = lane % 4;
  const int row = thread / 32 * 16 + g;  // of the strip; the lane has that and the 8th after it
  const Extent extent(work, kTokens, static_cast<unsigned>(work.splits));
  const uint32_t codes_to =
      shared_address(ring) +
      static_cast<uint32_t>(thread / 4 * (kDeep / 2) + ((thread % 4 / 2) ^ (thread / 8 % 2)) * 32 + thread % 2 * 16);
  const uint32_t scales_to = shared_address(scale_ring) + static_cast<uint32_t>(thread) * (work.nested ? 4U : 16U);
  const uint32_t first = extent.first_of(blockIdx.x), end = extent.first_of(blockIdx.x + 1);

  const uint32_t begin = first / extent.units;
  Asking asking = asking_of<kTokens>(work, begin, (first - begin * extent.units) * 2, static_cast<int>(end - first) * 2);
  {
    Asking of_codes = asking;
    for (int i = 0; i < Shape::kAhead; ++i) {
      ask_codes(work, of_codes, codes_to + i * Shape::kBytesEach, scales_to);
      advance<kTokens>(work, of_codes);
    }
  }
  if (thread < Shape::kRing) prepare_arrival(arrivals + thread);
  fill_wide<T>(table, work.nf4);
  if (thread < 256) map[thread] = __ldg(kDeviceSignedMap.values + thread);
  __syncthreads();
  wait_for_earlier_kernels();
  for (int i = 0; i < Shape::kAhead; ++i) {
    if (thread == 0) ask_x<kTokens>(asking, ring + i * Shape::kBytesEach, arrivals + i);
    advance<kTokens>(work, asking);
  }

  float sums[kTiles][4] = {}, part[kTiles][4] = {};
  float before[2] = {};  // scales of what is in `part`
  const auto take = [&] {
    wait_for_products(part);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      sums[j][0] += part[j][0] * before[0], sums[j][1] += part[j][1] * before[0];
      sums[j][2] += part[j][2] * before[1], sums[j][3] += part[j][3] * before[1];
    }
  };
  const uint32_t lane_bytes = static_cast<uint32_t>(lane) * 4U;
  int slot = 0, asked = Shape::kAhead;
  uint32_t turn = 0;  // of the ring
  for (uint32_t unit = first; unit < end;) {
    const uint32_t strip_tile = unit / extent.units, strip = strip_tile / extent.tiles;
    const uint32_t strip_end = min((strip_tile + 1) * extent.units, end);
    const int own = weight_of(work, strip);
    const bool is_first = unit == strip_tile * extent.units;
    const float offset = work.nested ? __ldg(work.asked.weights[own].nested_offset) : 0.0F;
    for (; unit < strip_end; ++unit) {
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        wait_groups<Shape::kAhead - 1>();
        __syncthreads();  // of all threads' copies; and the slot that is asked for next was read by all
        ask_codes(work, asking, codes_to + asked * Shape::kBytesEach, scales_to);
        if (thread == 0) ask_x<kTokens>(asking, ring + asked * Shape::kBytesEach, arrivals + asked);
        advance<kTokens>(work, asking);
        asked = asked + 1 == Shape::kRing ? 0 : asked + 1;
        const unsigned char* const here = ring + slot * Shape::kBytesEach;
        wait_for_arrival(arrivals + slot, turn);
        slot = slot + 1 == Shape::kRing ? 0 : slot + 1;
        turn ^= slot == 0 ? 1U : 0U;
        const unsigned char* const own_scales = scale_ring + (end - unit) % kScaleRing * kScales;
        float scales[2][2];  // [block][row]
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (work.nested) {
            const uint32_t codes = *reinterpret_cast<const uint16_t*>(own_scales + (row + i * 8) * 4 + half * 2);
            const float outer = *reinterpret_cast<const float*>(own_scales + (kHeight + row + i * 8) * 4);
            scales[0][i] = decode_scale_rn(map[codes & 255U], outer, offset);
            scales[1][i] = decode_scale_rn(map[codes >> 8U], outer, offset);
          } else {
            const float2 both = *reinterpret_cast<const float2*>(own_scales + (row + i * 8) * 16 + half * 8);
            scales[0][i] = both.x, scales[1][i] = both.y;
          }
        }
#pragma unroll
        for (int block = 0; block < 2; ++block) {
          uint2 codes[2];
#pragma unroll
          for (int i = 0; i < 2; ++i)
            codes[i] =
                *reinterpret_cast<const uint2*>(here + (row + i * 8) * (kDeep / 2) + (block ^ ((row >> 1) & 1)) * 32 + t * 8);
          take();
          uint32_t pairs[2][8], a[16];  // a: of a step of 16 k the rows g and g + 8 at its first bytes, then at its others
          wide_pairs(table, codes[0], lane_bytes, pairs[0]);
          wide_pairs(table, codes[1], lane_bytes, pairs[1]);
#pragma unroll
          for (int i = 0; i < 16; ++i) a[i] = pairs[i % 2][i / 2];
          before[0] = scales[block][0], before[1] = scales[block][1];
          begin_products(part, a);
          const uint64_t x = matrix_of(here + kDeepCodes + block * Shape::kTile);
#pragma unroll
          for (int step = 0; step < 4; ++step) {
            const uint32_t own_a[4] = {a[step * 4], a[step * 4 + 1], a[step * 4 + 2], a[step * 4 + 3]};
            multiply_wide<T>(part, own_a, x + step * 2U, step > 0);
          }
          end_products();
        }
      }
    }
    take();
    before[0] = before[1] = 0.0F;
    const GroupWeight& weight = work.asked.weights[own];
    // [part][token][row of all weights]
    const auto in_weight = static_cast<uint32_t>(strip - work.first_strip[own]) * kHeight + static_cast<uint32_t>(row);
    const uint32_t token0 = (strip_tile - strip * extent.tiles) * kTokens + static_cast<uint32_t>(t) * 2;
    const auto width = static_cast<uint32_t>(work.first_row[work.asked.count]), m = static_cast<uint32_t>(work.asked.m);
    if (is_first && weight.b != nullptr) add_adapter<T>(work, weight, in_weight, static_cast<int64_t>(token0) - t * 2, t, g, sums);
    float* to = work.asked.partial + work.first_row[own] + in_weight +
                (static_cast<int64_t>(blockIdx.x - extent.first_part(strip_tile)) * m + token0) * width;
    const int rows_left = static_cast<int>(weight.n - in_weight), tokens_left = static_cast<int>(m - token0);
#pragma unroll
    for (int j = 0; j < kTiles; ++j, to += width * 8U)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i / 2 * 8 < rows_left && j * 8 + i % 2 < tokens_left) to[i / 2 * 8 + i % 2 * width] = sums[j][i];
        sums[j][i] = part[j][i] = 0.0F;  // of part, as 0 times a NaN is one
      }
  }
  wait_groups<0>();
#endif
}

/// y = Σ partial + bias. A CTA has a strip and four rows of x, a thread four rows of W.
template <class T, int kTokens>
__global__ void __launch_bounds__(kHeight) finish_wide(const __grid_constant__ Work work) {
  constexpr int kAtOnce = 4;  // loads that nothing waits for
  const Extent extent(work, kTokens, static_cast<unsigned>(work.splits));
  const int own = weight_of(work, blockIdx.x);
  const auto row = (blockIdx.x - static_cast<uint32_t>(work.first_strip[own])) * kHeight + threadIdx.x % 64U * 4U;
  const uint32_t token = blockIdx.y * kFinished + threadIdx.x / 64U, column = static_cast<uint32_t>(work.first_row[own]) + row;
  const auto width = static_cast<uint32_t>(work.first_row[work.asked.count]), m = static_cast<uint32_t>(work.asked.m);
  const int rows = static_cast<int>(work.asked.weights[own].n) - static_cast<int>(row);
  wait_for_earlier_kernels();
  if (token >= m || rows <= 0) return;
  const auto parts = static_cast<int>(extent.parts(blockIdx.x * extent.tiles + token / kTokens));
  const float* from = work.asked.partial + static_cast<int64_t>(token) * width + column;
  const int64_t part_floats = static_cast<int64_t>(m) * width;
  const bool is_whole = rows >= 4 && (width | column) % 4U == 0U;
  float sums[4] = {};
  for (int part = 0; part < parts; part += kAtOnce, from += kAtOnce * part_floats) {
    float4 found[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float* const at = from + i * part_floats;
      found[i] = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
      if (part + i >= parts) continue;
      if (is_whole) {
        found[i] = *reinterpret_cast<const float4*>(at);
      } else {
        found[i].x = at[0];
        if (rows > 1) found[i].y = at[1];
        if (rows > 2) found[i].z = at[2];
        if (rows > 3) found[i].w = at[3];
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) sums[0] += found[i].x, sums[1] += found[i].y, sums[2] += found[i].z, sums[3] += found[i].w;
  }
  T* const y = static_cast<T*>(work.asked.y) + token * work.asked.y_stride + column;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i >= rows) break;
    const float bias = work.asked.bias == nullptr ? 0.0F : to_float(static_cast<const T*>(work.asked.bias)[column + i]);
    y[i] = from_float<T>(sums[i] + bias);
  }
}

/// The most parts that a strip has.
uint32_t most_parts(const Extent& extent) {
  uint32_t most = 1;
  for (uint32_t i = 0; i < extent.strips * extent.tiles; ++i) most = std::max(most, extent.parts(i));
  return most;
}
int tokens_of(int64_t m) { return m <= 16 ? 16 : m <= 32 ? 32 : 64; }

template <class T, int kTokens>
cudaError_t launch_wide(const GemmFourBitGroup& asked, int multiprocessors, Stream stream) {
  static std::atomic<signed char> known[64];
  constexpr int kBytes = Wide<kTokens>::kBytes;
  if (const cudaError_t error = allow(wide_rows<T, kTokens>, kBytes, known); error != cudaSuccess) return error;
  Work work = work_of(asked, kHeight);
  work.splits = multiprocessors;
  work.laid = reinterpret_cast<unsigned char*>(asked.partial);
  work.asked.partial += laid_bytes<kTokens>(work) / 4;
  const int64_t pieces = laid_bytes<kTokens>(work) / 16, of_x = (pieces + kBesideThreads - 1) / kBesideThreads;
  const int64_t of_u = (asked.m + kTileTokens - 1) / kTileTokens * ((asked.ranks + kTileRanks - 1) / kTileRanks);
  if (const cudaError_t error =
          launch_early<prepare_wide<T, kTokens>>(dim3(static_cast<unsigned>(of_u + of_x)), kBesideThreads, 0, stream, work);
      error != cudaSuccess)
    return error;
  const Extent extent(work, kTokens, static_cast<unsigned>(multiprocessors));
  if (const cudaError_t error = launch_early<wide_rows<T, kTokens>>(dim3(extent.ctas), kWideThreads, kBytes, stream, work);
      error != cudaSuccess)
    return error;
  const dim3 rest(extent.strips, static_cast<unsigned>((asked.m + kFinished - 1) / kFinished));
  return launch_early<finish_wide<T, kTokens>>(rest, kHeight, 0, stream, work);
}

template <class T>
cudaError_t launch_rows(const GemmFourBitGroup& asked, int multiprocessors, Stream stream) {
  switch (tokens_of(asked.m)) {
    case 16:
      return launch_wide<T, 16>(asked, multiprocessors, stream);
    case 32:
      return launch_wide<T, 32>(asked, multiprocessors, stream);
    default:
      return launch_wide<T, 64>(asked, multiprocessors, stream);
  }
}

}  // namespace

bool goes_wide(const GemmFourBitGroup& work) {
#ifdef QLORAPP_SM90A
  if (work.m <= kFewTokens || make_divisor(work.nested_block_size).shift < 0) return false;
  static std::atomic<signed char> known[64];
  return once_a_device(known, [] {
    int device = 0, major = 0, minor = 0;
    return cudaGetDevice(&device) == cudaSuccess &&
           cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
           cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess && major == 9 && minor == 0;
  });
#else  // built without code for sm_90
  static_cast<void>(work);
  return false;
#endif
}

int64_t wide_rows_floats(const GemmFourBitGroup& asked, int multiprocessors) {
  const Work work = work_of(asked, kHeight);
  const int tokens = tokens_of(asked.m);
  const uint32_t parts = most_parts(Extent(work, tokens, static_cast<unsigned>(multiprocessors)));
  return (asked.m + tokens - 1) / tokens * tokens * asked.k / 2 + parts * asked.m * work.first_row[asked.count];
}

cudaError_t multiply_wide_rows(const GemmFourBitGroup& work, int multiprocessors, Stream stream) {
  return work.type == Float::kFloat16 ? launch_rows<__half>(work, multiprocessors, stream)
                                      : launch_rows<__nv_bfloat16>(work, multiprocessors, stream);
}

}  // namespace qlorapp::cuda
