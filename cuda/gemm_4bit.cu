// SPDX-License-Identifier: Apache-2.0
/// The tensor cores' 16×8×16 product with the weight as its first operand: 16 rows of W, 8 rows of x. A lane holds, of two rows
/// of W, 16 neighbors in each block of 64 (one 8-byte read); which k of the block a product's 16 are is the lanes' choice, as
/// long as x is read alike. So codes go from memory to operand registers without moving between lanes.
///
/// A byte becomes a pair of numbers by one look-up. The table of 256 pairs has a copy for each lane, in the shared-memory bank
/// that is the lane's own: no conflicts. The product of a block is scaled in fp32 and added to the sums.
///
/// The warps of a CTA divide rows (kRowWarps) and k (kSplit); what the latter sum up is added through shared memory in order.
#include <algorithm>
#include <cstdint>

#include "code_books.cuh"
#include "early_launch.cuh"
#include "element.cuh"
#include "gemm_4bit.hpp"
#include "tensor_core.cuh"

namespace qlorapp::cuda {
namespace {

constexpr unsigned kAllLanes = 0xFFFFFFFFU;
constexpr int kBlock = 64;  // k that share a scale, at least

struct Work {
  const void* x;
  void* y;
  const uint8_t* packed;
  const void* absmax;
  const float* nested_absmax;
  const float* nested_offset;
  int64_t x_stride, y_stride, n, k;
  Divisor nested_block;
  int m;
  int block_shift;
  bool nf4, accumulate;
};

/// Pairs of a byte's two elements, [byte][lane].
using PairTable = uint32_t[256][32];

template <class T>
__device__ __forceinline__ void fill(PairTable& table, bool nf4) {
  const unsigned lane = threadIdx.x & 31U;
  const float entry = __ldg((nf4 ? kDeviceNf4 : kDeviceFp4).values + (lane & 15U));
  for (unsigned byte = threadIdx.x; byte < 256U; byte += blockDim.x) {
    const float first = __shfl_sync(kAllLanes, entry, static_cast<int>(byte >> 4U));
    const float second = __shfl_sync(kAllLanes, entry, static_cast<int>(byte & 15U));
    const uint32_t pair = pack_pair<T>(first, second);
#pragma unroll
    for (unsigned i = 0; i < 8; ++i)  // eight lanes write eight different banks' quarters
      *reinterpret_cast<uint4*>(&table[byte][((i + lane) & 7U) * 4U]) = make_uint4(pair, pair, pair, pair);
  }
}
/// A row of the table has 128 bytes, so byte b of the word is moved 8·b - 7 bits down to become an offset.
template <int kByte>
__device__ __forceinline__ uint32_t pair_of(const PairTable& table, uint32_t word, uint32_t lane_bytes) {
  const uint32_t place = kByte == 0 ? word << 7U : word >> (8 * kByte - 7);
  return *reinterpret_cast<const uint32_t*>(reinterpret_cast<const char*>(&table[0][0]) + ((place & 0x7F80U) | lane_bytes));
}

/// What a warp reads at a time, kGroup blocks of 64, before it works on what it read last time: nothing here waits for memory.
template <int kRowTiles, int kTokenTiles, int kGroup>
struct Group {
  uint2 codes[kRowTiles][2][kGroup];
  uint4 x[kTokenTiles][kGroup][2];
  // Of lane t of four: the scale of block t, or what makes it.
  float scales[kRowTiles][2];
  uint32_t scale_codes[kRowTiles][2];
};

template <int kRowTiles, int kTokenTiles, int kGroup>
struct Reader {
  const uint8_t* packed[kRowTiles][2];  // of two rows of W each, this lane's 8 bytes of the first block
  const uint4* x[kTokenTiles];          // of a row of x each, this lane's 16 numbers of the first block
  int64_t row_blocks[kRowTiles][2];     // block 0 of those rows in the whole weight, in 64s
  int64_t blocks;
  int t;

  template <class T>
  __device__ static Reader of(const Work& work, int64_t first_row, int g, int t) {
    Reader reader;
    reader.blocks = work.k / kBlock;
    reader.t = t;
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t row = min(first_row + tile * 16 + half * 8 + g, work.n - 1);  // beyond the end: not stored
        reader.packed[tile][half] = work.packed + row * (work.k / 2) + t * 8;
        reader.row_blocks[tile][half] = row * reader.blocks;
      }
#pragma unroll
    for (int token = 0; token < kTokenTiles; ++token)
      reader.x[token] =
          reinterpret_cast<const uint4*>(static_cast<const T*>(work.x) + min(token * 8 + g, work.m - 1) * work.x_stride + t * 16);
    return reader;
  }

  __device__ __forceinline__ void read(const Work& work, int64_t block, Group<kRowTiles, kTokenTiles, kGroup>& to) const {
    const int64_t own = min(block + min(t, kGroup - 1), blocks - 1);
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < kGroup; ++i)  // beyond the end: not used
          to.codes[tile][half][i] =
              read_once(reinterpret_cast<const uint2*>(packed[tile][half] + min(block + i, blocks - 1) * (kBlock / 2)));
        const int64_t scale = (row_blocks[tile][half] + own) >> (work.block_shift - 6);
        if (work.nested_absmax == nullptr) {
          to.scales[tile][half] = __ldg(static_cast<const float*>(work.absmax) + scale);
        } else {
          to.scale_codes[tile][half] = __ldg(static_cast<const uint8_t*>(work.absmax) + scale);
          to.scales[tile][half] = __ldg(work.nested_absmax + divide(scale, work.nested_block));
        }
      }
#pragma unroll
    for (int token = 0; token < kTokenTiles; ++token)
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const uint4* const from = x[token] + min(block + i, blocks - 1) * (kBlock / 8);
        to.x[token][i][0] = __ldg(from);
        to.x[token][i][1] = __ldg(from + 1);
      }
  }
};

template <class T, int kRowTiles, int kTokenTiles, int kRowWarps, int kSplit, int kGroup>
__global__ void __launch_bounds__(32 * kRowWarps * kSplit) multiply_few(const __grid_constant__ Work work) {
  constexpr int kWarpRows = 16 * kRowTiles;
  constexpr int kTokens = 8 * kTokenTiles;
  extern __shared__ __align__(128) unsigned char shared[];
  PairTable& table = *reinterpret_cast<PairTable*>(shared);
  float* const map = reinterpret_cast<float*>(shared + sizeof(PairTable));

  const int lane = static_cast<int>(threadIdx.x & 31U);
  const int warp = static_cast<int>(threadIdx.x / 32U);
  const int split = warp % kSplit;
  const int g = lane / 4;
  const int t = lane % 4;
  const int64_t first_row = (static_cast<int64_t>(blockIdx.x) * kRowWarps + warp / kSplit) * kWarpRows;
  const bool nested = work.nested_absmax != nullptr;

  using Reading = Reader<kRowTiles, kTokenTiles, kGroup>;
  const Reading reader = Reading::template of<T>(work, first_row, g, t);
  const int64_t blocks = reader.blocks;
  fill<T>(table, work.nf4);  // constants: before the wait
  for (unsigned i = threadIdx.x; i < 256U; i += blockDim.x) map[i] = __ldg(kDeviceSignedMap.values + i);
  wait_for_earlier_kernels();
  Group<kRowTiles, kTokenTiles, kGroup> next;
  int64_t block = static_cast<int64_t>(split) * kGroup;
  if (block < blocks) reader.read(work, block, next);
  const float offset = nested ? __ldg(work.nested_offset) : 0.0F;
  __syncthreads();

  float sums[kRowTiles][kTokenTiles][4] = {};
  const uint32_t lane_bytes = static_cast<uint32_t>(lane) * 4U;
  for (; block < blocks; block += kGroup * kSplit) {
    const Group<kRowTiles, kTokenTiles, kGroup> now = next;
    if (block + kGroup * kSplit < blocks) reader.read(work, block + kGroup * kSplit, next);
    float own[kRowTiles][2];
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        own[tile][half] =
            nested ? decode_scale_rn(map[now.scale_codes[tile][half]], now.scales[tile][half], offset) : now.scales[tile][half];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (block + i >= blocks) break;
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        uint32_t pairs[2][8];
        float scales[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint2 codes = now.codes[tile][half][i];
          pairs[half][0] = pair_of<0>(table, codes.x, lane_bytes);
          pairs[half][1] = pair_of<1>(table, codes.x, lane_bytes);
          pairs[half][2] = pair_of<2>(table, codes.x, lane_bytes);
          pairs[half][3] = pair_of<3>(table, codes.x, lane_bytes);
          pairs[half][4] = pair_of<0>(table, codes.y, lane_bytes);
          pairs[half][5] = pair_of<1>(table, codes.y, lane_bytes);
          pairs[half][6] = pair_of<2>(table, codes.y, lane_bytes);
          pairs[half][7] = pair_of<3>(table, codes.y, lane_bytes);
          scales[half] = __shfl_sync(kAllLanes, own[tile][half], (lane & ~3) + i);
        }
#pragma unroll
        for (int token = 0; token < kTokenTiles; ++token) {
          const uint4 low = now.x[token][i][0];
          const uint4 high = now.x[token][i][1];
          const auto& a = pairs[0];
          const auto& b = pairs[1];
          float part[4] = {};
          multiply<T>(part, a[0], b[0], a[1], b[1], low.x, low.y);
          multiply<T>(part, a[2], b[2], a[3], b[3], low.z, low.w);
          multiply<T>(part, a[4], b[4], a[5], b[5], high.x, high.y);
          multiply<T>(part, a[6], b[6], a[7], b[7], high.z, high.w);
          float(&sum)[4] = sums[tile][token];
          sum[0] += part[0] * scales[0];
          sum[1] += part[1] * scales[0];
          sum[2] += part[2] * scales[1];
          sum[3] += part[3] * scales[1];
        }
      }
    }
  }

  // Sums of all splits, [row warp][split][token][row], where the table was.
  __syncthreads();
  float* const parts = reinterpret_cast<float*>(shared);
  float* const own = parts + warp * kTokens * kWarpRows;
#pragma unroll
  for (int tile = 0; tile < kRowTiles; ++tile)
#pragma unroll
    for (int token = 0; token < kTokenTiles; ++token)
#pragma unroll
      for (int i = 0; i < 4; ++i) own[(token * 8 + t * 2 + i % 2) * kWarpRows + tile * 16 + i / 2 * 8 + g] = sums[tile][token][i];
  __syncthreads();
  constexpr int kRows = kWarpRows * kRowWarps;
  T* const y = static_cast<T*>(work.y);
  const int64_t cta_row = static_cast<int64_t>(blockIdx.x) * kRows;
  for (int i = static_cast<int>(threadIdx.x); i < kTokens * kRows; i += 32 * kRowWarps * kSplit) {
    const int row = i % kRows;
    const int token = i / kRows;
    if (token >= work.m || cta_row + row >= work.n) continue;
    const float* from = parts + ((row / kWarpRows * kSplit) * kTokens + token) * kWarpRows + row % kWarpRows;
    float sum = 0.0F;
#pragma unroll
    for (int s = 0; s < kSplit; ++s) sum += from[s * kTokens * kWarpRows];
    T* const place = y + token * work.y_stride + cta_row + row;
    if (work.accumulate) sum += to_float(*place);
    *place = from_float<T>(sum);
  }
}

template <class T, int kRowTiles, int kTokenTiles, int kRowWarps, int kSplit, int kGroup>
cudaError_t launch(const Work& work, Stream stream) {
  constexpr int kRows = 16 * kRowTiles * kRowWarps;
  constexpr int kParts = 8 * kTokenTiles * kRows * kSplit * static_cast<int>(sizeof(float));
  constexpr int kBytes = std::max(kParts, static_cast<int>(sizeof(PairTable) + 256 * sizeof(float)));
  static_assert(kBytes <= 48 * 1024);
  const auto grid = static_cast<unsigned>((work.n + kRows - 1) / kRows);
  return launch_early<multiply_few<T, kRowTiles, kTokenTiles, kRowWarps, kSplit, kGroup>>(grid, 32 * kRowWarps * kSplit, kBytes,
                                                                                          stream, work);
}

/// Shapes as measured on an H200 (benchmarks/dequantize_cuda.py). Few tokens: the weight's bytes decide, and k is divided so
/// that short matrices fill the GPU too. More tokens or rows: x is read again for every CTA, so a CTA takes more rows.
template <class T>
cudaError_t launch_tokens(const Work& work, Stream stream) {
  const int64_t tiles = (work.n + 15) / 16;
  if (work.m <= 8) {
    if (tiles <= 132) return launch<T, 1, 1, 1, 8, 4>(work, stream);
    if (tiles <= 600) return launch<T, 1, 1, 1, 8, 2>(work, stream);
    return launch<T, 2, 1, 1, 8, 2>(work, stream);
  }
  if (work.m <= 16) {
    if (tiles <= 1000) return launch<T, 1, 2, 1, 8, 2>(work, stream);
    return launch<T, 1, 2, 2, 4, 2>(work, stream);
  }
  if (work.m <= 32) {
    if (tiles <= 512) return launch<T, 1, 4, 1, 8, 1>(work, stream);
    return launch<T, 1, 4, 2, 4, 1>(work, stream);
  }
  return launch<T, 1, 8, 2, 4, 1>(work, stream);
}

__global__ void nothing() {}

}  // namespace

int code_architecture() {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, nothing) == cudaSuccess ? attributes.ptxVersion : 0;
}

bool prefers_gemm_4bit(int64_t m, int64_t n, int64_t k, int64_t block_size, Float type, int arch) {
  if (type == Float::kFloat32 || (type == Float::kBFloat16 && arch < 80) || arch < 75) return false;
  if (m < 1 || m > 64 || n < 1 || k < kBlock || k % kBlock != 0 || block_size < kBlock) return false;
  if (m <= 8) return true;
  if (arch != 90) return false;  // not measured; up to 8 rows the weight's bytes decide everywhere
  if (m <= 16) return n >= 2048 || k <= 8192;
  if (m <= 32) return n >= 4096 || k <= 4096;
  return n >= 4096 && n <= 8192 && k >= 8192;
}

cudaError_t gemm_4bit(const GemmFourBit& asked, Stream stream) {
  const Work work{asked.x,
                  asked.y,
                  asked.packed,
                  asked.absmax,
                  asked.nested_absmax,
                  asked.nested_offset,
                  asked.x_stride,
                  asked.y_stride,
                  asked.n,
                  asked.k,
                  make_divisor(asked.nested_block_size),
                  static_cast<int>(asked.m),
                  make_divisor(asked.block_size).shift,
                  asked.quant_type == QuantType::kNf4,
                  asked.accumulate};
  if (asked.type == Float::kFloat16) return launch_tokens<__half>(work, stream);
  return launch_tokens<__nv_bfloat16>(work, stream);
}

}  // namespace qlorapp::cuda
