// SPDX-License-Identifier: Apache-2.0
/// Up to 128 rows of x (gemm_4bit_group.hpp). A warp has 32 rows of W and all of x, which the CTA's warps share in shared memory; k is divided among
/// CTAs, whose sums a second kernel adds up. Copies and banks as in gemm_4bit_few.cu.
///
/// W is what a dequantized weight has: scaled in fp32, rounded once. The adapter's part is one more product, of u and B.
#include <algorithm>
#include <atomic>
#include <cstdint>

#include "group_work.cuh"
#include "tensor_core.cuh"

namespace qlorapp::cuda {
namespace {

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

/// A byte's two elements, as a dequantized weight has them: scaled in fp32, rounded once.
template <class T, int kByte>
__device__ __forceinline__ uint32_t scaled_pair(const unsigned char* table, uint32_t word, uint32_t lane_bytes, float scale) {
  const uint32_t place = kByte == 0 ? word << 7U : word >> (8 * kByte - 7);
  const float2 pair = *reinterpret_cast<const float2*>(table + ((place & 0x7F80U) | lane_bytes));
  return pack_pair<T>(__fmul_rn(pair.x, scale), __fmul_rn(pair.y, scale));
}

/// A thread copies 16 bytes of every 64th row of codes and of every 16th row of x. Rows beyond the end are not copied. Only results that are not
/// stored depend on them.
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
  /// Reads a stage's scales: with double quantization two codes and their second-level scale, else two floats.
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
  fill_pairs<kFloatTable / 256>(table, work.nf4, blockDim.x);
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

int64_t splits_of(const Work& work, int multiprocessors) {
  const int64_t strips = work.first_strip[work.asked.count], stages = work.asked.k / kDeep, ctas = work.asked.m <= 64 ? 2 : 1;
  return std::clamp<int64_t>(ctas * multiprocessors / std::max<int64_t>(1, strips), 1, std::max<int64_t>(1, stages / 2));
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

/// The instance for so many rows.
template <class T>
cudaError_t launch_rows(const GemmFourBitGroup& asked, int multiprocessors, Stream stream) {
  if (asked.m <= 16) return launch_more<T, 2>(asked, multiprocessors, stream);
  if (asked.m <= 32) return launch_more<T, 4>(asked, multiprocessors, stream);
  if (asked.m <= 64) return launch_more<T, 8>(asked, multiprocessors, stream);
  return launch_more<T, 16>(asked, multiprocessors, stream);
}

}  // namespace

int64_t more_rows_floats(const GemmFourBitGroup& asked, int multiprocessors) {
  const Work work = work_of(asked, kHigh);
  const int64_t splits = splits_of(work, multiprocessors);
  return splits == 1 ? 0 : splits * asked.m * work.first_row[asked.count];
}

cudaError_t multiply_more_rows(const GemmFourBitGroup& work, int multiprocessors, Stream stream) {
  return work.type == Float::kFloat16 ? launch_rows<__half>(work, multiprocessors, stream)
                                      : launch_rows<__nv_bfloat16>(work, multiprocessors, stream);
}

}  // namespace qlorapp::cuda
