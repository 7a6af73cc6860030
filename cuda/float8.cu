// SPDX-License-Identifier: Apache-2.0
/// Weights: a block expands a tile of 128 × 128. A thread holds eight columns of four neighboring rows, so that conversions,
/// which make two bytes at a time, pair what lies side by side in the output: columns as they are, rows for the transpose, which
/// then goes through shared memory in words of four rows, free of bank conflicts both ways. The tile's scales are decoded once.
///
/// Rows: a block holds its row in registers between finding the largest and rounding.
#include <cuda_fp8.h>

#include <cstdint>

#include "code_books.cuh"
#include "early_launch.cuh"
#include "element.cuh"
#include "float8.hpp"

namespace qlorapp::cuda {
namespace {

constexpr float kLargest = 448;  // of e4m3
constexpr unsigned kAllLanes = 0xFFFFFFFFU;

/// Two neighbors, the first in the low byte; beyond 448 is 448.
__device__ __forceinline__ uint32_t pack_float8(float first, float second) {
  return __nv_cvt_float2_to_fp8x2(make_float2(first, second), __NV_SATFINITE, __NV_E4M3);
}

struct Segment {
  const uint8_t* packed;
  const void* absmax;
  const float* nested_absmax;
  const float* nested_offset;
  int64_t rows;
  int64_t first_row;
  int first_tile;  // of rows
};

struct Work {
  Segment segments[kMaxFourBitSegments];
  int segment_count;
  int64_t rows;
  int64_t columns;
  Divisor nested_block;
  int block_shift;
  bool nf4;
  const float* weight_scale;
  uint8_t* out;
};

constexpr int kTile = 128;
constexpr int kThreads = 256;
constexpr int kSubBlock = 32;  // elements that surely share a scale
constexpr int kScalesOfRow = kTile / kSubBlock;
constexpr int kWordsOfColumn = kTile / 4 + 1;  // of four rows each, and one that keeps columns in different banks

template <bool kNested>
__device__ __forceinline__ float scale_at(const Segment& segment, int64_t block, Divisor nested_block) {
  if constexpr (!kNested) return __ldg(static_cast<const float*>(segment.absmax) + block);
  const uint8_t code = __ldg(static_cast<const uint8_t*>(segment.absmax) + block);
  const float nested_absmax = __ldg(segment.nested_absmax + divide(block, nested_block));
  return decode_scale_rn(__ldg(kDeviceSignedMap.values + code), nested_absmax, __ldg(segment.nested_offset));
}

template <bool kNested, bool kTranspose>
__global__ void __launch_bounds__(kThreads) expand_to_float8(const __grid_constant__ Work work) {
  __shared__ float scales[kTile * kScalesOfRow];
  __shared__ uint32_t turned[kTranspose ? kTile * kWordsOfColumn : 1];
  wait_for_earlier_kernels();
  int index = 0;
#pragma unroll
  for (int i = 1; i < kMaxFourBitSegments; ++i)
    if (i < work.segment_count && static_cast<int>(blockIdx.y) >= work.segments[i].first_tile) index = i;
  const Segment& segment = work.segments[index];
  const int64_t first_row = (static_cast<int64_t>(blockIdx.y) - segment.first_tile) * kTile;  // of the segment
  const int64_t first_column = static_cast<int64_t>(blockIdx.x) * kTile;
  const int rows = static_cast<int>(min(static_cast<int64_t>(kTile), segment.rows - first_row));
  const int columns = static_cast<int>(min(static_cast<int64_t>(kTile), work.columns - first_column));
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = thread >> 5;
  const float inverse = __fdiv_rn(1.0F, __ldg(work.weight_scale));

  for (int i = thread; i < kTile * kScalesOfRow; i += kThreads) {
    const int row = i / kScalesOfRow, sub = i % kScalesOfRow;
    float scale = 0;
    if (row < rows && sub * kSubBlock < columns) {
      const int64_t element = (first_row + row) * work.columns + first_column + sub * kSubBlock;
      scale = scale_at<kNested>(segment, element >> work.block_shift, work.nested_block);
    }
    scales[i] = scale;
  }
  const float book = __ldg((work.nf4 ? kDeviceNf4 : kDeviceFp4).values + (lane & 15));
  __syncthreads();

  // A warp takes 32 columns of 32 rows at a time: four lanes side by side, eight below each other.
#pragma unroll
  for (int part = warp; part < 16; part += kThreads / 32) {
    const int column = (part & 3) * 32 + (lane >> 3) * 8, row = (part >> 2) * 32 + (lane & 7) * 4;
    uint32_t words[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const bool inside = row + r < rows && column < columns;
      const int64_t element = (first_row + row + r) * work.columns + first_column + column;
      words[r] = inside ? __ldg(reinterpret_cast<const uint32_t*>(segment.packed) + element / 8) : 0;
    }
    float values[4][8];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const float scale = scales[(row + r) * kScalesOfRow + column / kSubBlock];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const uint32_t code = words[r] >> (4 * (j ^ 1));  // the high nibble first
        values[r][j] = __fmul_rn(__fmul_rn(__shfl_sync(kAllLanes, book, static_cast<int>(code)), scale), inverse);
      }
    }
    if constexpr (kTranspose) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        turned[(column + j) * kWordsOfColumn + row / 4] =
            pack_float8(values[0][j], values[1][j]) | pack_float8(values[2][j], values[3][j]) << 16U;
      }
    } else {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        if (row + r >= rows || column >= columns) continue;
        const uint2 eight = make_uint2(pack_float8(values[r][0], values[r][1]) | pack_float8(values[r][2], values[r][3]) << 16U,
                                       pack_float8(values[r][4], values[r][5]) | pack_float8(values[r][6], values[r][7]) << 16U);
        const int64_t place = (segment.first_row + first_row + row + r) * work.columns + first_column + column;
        *reinterpret_cast<uint2*>(work.out + place) = eight;
      }
    }
  }
  if constexpr (kTranspose) {
    __syncthreads();
    if (lane * 4 < rows) {
      for (int column = warp; column < columns; column += kThreads / 32) {
        const int64_t place = (first_column + column) * work.rows + segment.first_row + first_row + lane * 4;
        *reinterpret_cast<uint32_t*>(work.out + place) = turned[column * kWordsOfColumn + lane];
      }
    }
  }
}

struct RowsWork {
  const void* x;
  int64_t columns;
  int64_t row_stride;
  const float* weight_scale;
  uint8_t* values;
  float* scale;
};

/// Eight neighbors at any alignment.
template <class T, bool kAligned>
__device__ __forceinline__ void load(const T* in, float (&v)[8]) {
  if constexpr (kAligned) {
    load_eight(in, v);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = to_float(in[i]);
  }
}

template <class T, int kChunks, bool kAligned>
__global__ void __launch_bounds__(kThreads) quantize_rows(const __grid_constant__ RowsWork work) {
  __shared__ float largest_of_warp[kThreads / 32];
  wait_for_earlier_kernels();
  const int64_t row = blockIdx.x;
  const T* const x = static_cast<const T*>(work.x) + row * work.row_stride;
  float values[kChunks][8];
  float largest = 0;
  bool finite = true;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const int64_t at = (int64_t{chunk} * kThreads + threadIdx.x) * 8;
    if (at < work.columns) {
      load<T, kAligned>(x + at, values[chunk]);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float size = fabsf(values[chunk][i]);
        finite = finite && size == size;
        largest = fmaxf(largest, size);  // passes NaN by
      }
    }
  }
  if (!finite) largest = __int_as_float(0x7FC00000);
  // NaN wins: as an unsigned number its bits are above those of every other size.
  unsigned bits = __float_as_uint(largest);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) bits = max(bits, __shfl_xor_sync(kAllLanes, bits, step));
  const unsigned lane = threadIdx.x & 31U, warp = threadIdx.x / 32U;
  if (lane == 0) largest_of_warp[warp] = __uint_as_float(bits);
  __syncthreads();
  bits = __float_as_uint(largest_of_warp[lane % (kThreads / 32)]);
#pragma unroll
  for (int step = 4; step > 0; step /= 2) bits = max(bits, __shfl_xor_sync(kAllLanes, bits, step));
  largest = __uint_as_float(bits);
  const bool nothing = largest < kSmallestFloat8Row;
  const float factor = nothing ? 0.0F : __fdiv_rn(kLargest, largest);
  if (threadIdx.x == 0) {
    const float scale = nothing ? 1.0F : __fdiv_rn(largest, kLargest);
    work.scale[row] = work.weight_scale == nullptr ? scale : __fmul_rn(scale, __ldg(work.weight_scale));
  }
  uint8_t* const out = work.values + row * work.columns;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const int64_t at = (int64_t{chunk} * kThreads + threadIdx.x) * 8;
    if (at < work.columns) {
      uint32_t halves[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float scaled[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) scaled[i] = __fmul_rn(values[chunk][half * 4 + i], factor);
        halves[half] = pack_float8(scaled[0], scaled[1]) | pack_float8(scaled[2], scaled[3]) << 16U;
      }
      *reinterpret_cast<uint2*>(out + at) = make_uint2(halves[0], halves[1]);
    }
  }
}

template <class T, bool kAligned>
cudaError_t launch_rows(const RowsWork& work, int64_t rows, Stream stream) {
  const auto grid = static_cast<unsigned>(rows);
  const int64_t chunks = (work.columns + kThreads * 8 - 1) / (kThreads * 8);
  if (chunks <= 1) return launch_early<quantize_rows<T, 1, kAligned>>(grid, kThreads, 0, stream, work);
  if (chunks <= 2) return launch_early<quantize_rows<T, 2, kAligned>>(grid, kThreads, 0, stream, work);
  if (chunks <= 4) return launch_early<quantize_rows<T, 4, kAligned>>(grid, kThreads, 0, stream, work);
  if (chunks <= 8) return launch_early<quantize_rows<T, 8, kAligned>>(grid, kThreads, 0, stream, work);
  if (chunks <= 16) return launch_early<quantize_rows<T, 16, kAligned>>(grid, kThreads, 0, stream, work);
  return cudaErrorInvalidValue;
}

template <class T>
cudaError_t launch_rows(const QuantizeRowsToFloat8& asked, const RowsWork& work, Stream stream) {
  const bool aligned = aligned_to(asked.x, 16) && asked.row_stride * static_cast<int64_t>(sizeof(T)) % 16 == 0;
  return aligned ? launch_rows<T, true>(work, asked.rows, stream) : launch_rows<T, false>(work, asked.rows, stream);
}

}  // namespace

cudaError_t dequantize_to_float8(const DequantizeToFloat8& asked, Stream stream) {
  Work work{};
  int64_t tiles = 0;
  bool nested = false;
  for (int i = 0; i < asked.segment_count; ++i) {
    const FourBitSegment& from = asked.segments[i];
    if (from.rows % kFloat8Step != 0 || !aligned_to(from.packed, 4)) return cudaErrorInvalidValue;
    work.segments[work.segment_count++] = {from.packed, from.absmax,    from.nested_absmax,     from.nested_offset,
                                           from.rows,   from.first_row, static_cast<int>(tiles)};
    tiles += (from.rows + kTile - 1) / kTile;
    nested = from.nested_absmax != nullptr;
  }
  if (tiles == 0 || asked.columns == 0) return cudaSuccess;
  if (asked.columns % kFloat8Step != 0 || !aligned_to(asked.out, 16)) return cudaErrorInvalidValue;
  work.rows = asked.rows;
  work.columns = asked.columns;
  work.nested_block = make_divisor(asked.nested_block_size);
  work.block_shift = make_divisor(asked.block_size).shift;
  work.nf4 = asked.quant_type == QuantType::kNf4;
  work.weight_scale = asked.weight_scale;
  work.out = static_cast<uint8_t*>(asked.out);
  const dim3 grid(static_cast<unsigned>((asked.columns + kTile - 1) / kTile), static_cast<unsigned>(tiles));
  if (nested && asked.transpose) return launch_early<expand_to_float8<true, true>>(grid, kThreads, 0, stream, work);
  if (nested) return launch_early<expand_to_float8<true, false>>(grid, kThreads, 0, stream, work);
  if (asked.transpose) return launch_early<expand_to_float8<false, true>>(grid, kThreads, 0, stream, work);
  return launch_early<expand_to_float8<false, false>>(grid, kThreads, 0, stream, work);
}

cudaError_t quantize_rows_to_float8(const QuantizeRowsToFloat8& asked, Stream stream) {
  if (asked.rows == 0 || asked.columns == 0) return cudaSuccess;
  if (asked.columns % 16 != 0) return cudaErrorInvalidValue;
  const RowsWork work{asked.x,    asked.columns, asked.row_stride, asked.weight_scale, static_cast<uint8_t*>(asked.values),
                      asked.scale};
  switch (asked.type) {
    case Float::kFloat32:
      return launch_rows<float>(asked, work, stream);
    case Float::kFloat16:
      return launch_rows<__half>(asked, work, stream);
    case Float::kBFloat16:
      return launch_rows<__nv_bfloat16>(asked, work, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace qlorapp::cuda
