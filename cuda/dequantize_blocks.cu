// SPDX-License-Identifier: Apache-2.0
// One thread makes eight neighbors of a row, so a warp writes 512 bytes of 16-bit values side by side. Scales are read and decoded by every
// thread that needs them: they come from L1.
#include <cstdint>

#include "dequantize_blocks.hpp"
#include "element.cuh"

namespace qlorapp::cuda {
namespace {

constexpr int kChunk = 8;
constexpr int kThreads = 256;

__device__ __forceinline__ float half_at(const uint8_t* at) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(at[0] | (at[1] << 8))));
}

/// Scale and min of the j-th 32 elements of a K block, whose bytes 4 to 15 have them in six bits.
__device__ __forceinline__ void scale_min(const uint8_t* block, int j, float& scale, float& min) {
  const uint8_t* const s = block + 4;
  const int q = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | ((s[j - 4] >> 6) << 4);
  const int m = j < 4 ? s[j + 4] & 63 : (s[j + 4] >> 4) | ((s[j] >> 6) << 4);
  scale = __fmul_rn(half_at(block), static_cast<float>(q));
  min = __fmul_rn(half_at(block + 2), static_cast<float>(m));
}

/// Elements [at, at + 8) of a block of 32; no block of eight crosses its two halves.
template <QuantType kType>
__device__ __forceinline__ void decode_32(const uint8_t* block, int at, float (&v)[kChunk]) {
  constexpr bool kMin = kType == QuantType::kQ4_1 || kType == QuantType::kQ5_1;
  constexpr bool kFive = kType == QuantType::kQ5_0 || kType == QuantType::kQ5_1;
  constexpr int kHigh = kMin ? 4 : 2, kCodes = kHigh + (kFive ? 4 : 0);
  constexpr int kMiddle = kMin ? 0 : kFive ? 16 : 8;
  const float d = half_at(block), m = kMin ? half_at(block + 2) : 0.0f;
#pragma unroll
  for (int k = 0; k < kChunk; ++k) {
    const int i = at + k;
    int q = i < 16 ? block[kCodes + i] & 15 : block[kCodes + i - 16] >> 4;
    if constexpr (kFive) q |= ((block[kHigh + i / 8] >> (i % 8)) & 1) << 4;
    const float product = __fmul_rn(d, static_cast<float>(q - kMiddle));
    v[k] = kMin ? __fadd_rn(product, m) : product;
  }
}

__device__ __forceinline__ void decode_q8_0(const uint8_t* block, int at, float (&v)[kChunk]) {
  const float d = half_at(block);
#pragma unroll
  for (int k = 0; k < kChunk; ++k) v[k] = __fmul_rn(static_cast<float>(static_cast<int8_t>(block[2 + at + k])), d);
}

template <bool kFive>
__device__ __forceinline__ void decode_k(const uint8_t* block, int at, float (&v)[kChunk]) {
  const int j = at / 32, within = at % 32;
  float scale, min;
  scale_min(block, j, scale, min);
  const uint8_t* const codes = block + 16 + (kFive ? 32 : 0) + 32 * (j / 2) + within;
  const int shift = j % 2 * 4;
#pragma unroll
  for (int k = 0; k < kChunk; ++k) {
    int q = (codes[k] >> shift) & 15;
    if constexpr (kFive) q |= ((block[16 + within + k] >> j) & 1) << 4;
    v[k] = __fsub_rn(__fmul_rn(scale, static_cast<float>(q)), min);
  }
}

__device__ __forceinline__ void decode_q6_k(const uint8_t* block, int at, float (&v)[kChunk]) {
  const int half = at / 128, quarter = at % 128 / 32, within = at % 32;
  const uint8_t* const low = block + 64 * half + 32 * (quarter % 2) + within;
  const uint8_t* const high = block + 128 + 32 * half + within;
  const float scale = __fmul_rn(half_at(block + 208), static_cast<float>(static_cast<int8_t>(block[192 + at / 16])));
  const int shift = quarter < 2 ? 0 : 4;
#pragma unroll
  for (int k = 0; k < kChunk; ++k) {
    const int q = (((low[k] >> shift) & 15) | (((high[k] >> (2 * quarter)) & 3) << 4)) - 32;
    v[k] = __fmul_rn(scale, static_cast<float>(q));
  }
}

template <QuantType kType>
struct Layout {
  static constexpr int kElements = static_cast<int>(block_elements(kType));
  static constexpr int64_t kBytes = block_bytes(kType);
};

template <QuantType kType>
__device__ __forceinline__ void decode(const uint8_t* row, int64_t at, float (&v)[kChunk]) {
  constexpr int kElements = Layout<kType>::kElements;
  const uint8_t* const block = row + at / kElements * Layout<kType>::kBytes;
  const int within = static_cast<int>(at % kElements);
  if constexpr (kType == QuantType::kQ8_0) decode_q8_0(block, within, v);
  else if constexpr (kType == QuantType::kQ4_K) decode_k<false>(block, within, v);
  else if constexpr (kType == QuantType::kQ5_K) decode_k<true>(block, within, v);
  else if constexpr (kType == QuantType::kQ6_K) decode_q6_k(block, within, v);
  else decode_32<kType>(block, within, v);
}

struct Work {
  FourBitSegment segments[kMaxFourBitSegments];
  int segment_count = 0;
  int64_t columns = 0, row_bytes = 0, row_stride = 0;
  void* out = nullptr;
};

template <class T, QuantType kType>
__global__ void __launch_bounds__(kThreads) dequantize_blocks_kernel(Work work, bool aligned) {
  const int64_t row = blockIdx.x;
  int i = 0;
  while (i + 1 < work.segment_count && row >= work.segments[i + 1].first_row - work.segments[0].first_row) ++i;
  const FourBitSegment& segment = work.segments[i];
  const int64_t within = row + work.segments[0].first_row - segment.first_row;
  const uint8_t* const from = segment.packed + within * work.row_bytes;
  T* const out = static_cast<T*>(work.out) + (segment.first_row + within) * work.row_stride;
  const int64_t step = static_cast<int64_t>(gridDim.y) * kThreads;
  for (int64_t chunk = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x; chunk < work.columns / kChunk; chunk += step) {
    float v[kChunk];
    decode<kType>(from, chunk * kChunk, v);
    T* const place = out + chunk * kChunk;
    if (aligned) {
      store_eight<false>(place, v);
    } else {
#pragma unroll
      for (int k = 0; k < kChunk; ++k) place[k] = from_float<T>(v[k]);
    }
  }
}

template <class T, QuantType kType>
cudaError_t launch(const Work& work, int64_t rows, Stream stream) {
  const bool aligned = aligned_to(work.out, 16) && work.row_stride * static_cast<int64_t>(sizeof(T)) % 16 == 0;
  const int64_t chunks = work.columns / kChunk;
  const auto tiles = static_cast<unsigned>((chunks + kThreads - 1) / kThreads);
  const dim3 grid(static_cast<unsigned>(rows), tiles < 65535 ? tiles : 65535);
  dequantize_blocks_kernel<T, kType><<<grid, kThreads, 0, stream>>>(work, aligned);
  return cudaGetLastError();
}

template <class T>
cudaError_t launch_type(const Work& work, int64_t rows, QuantType type, Stream stream) {
  switch (type) {
    case QuantType::kQ4_0:
      return launch<T, QuantType::kQ4_0>(work, rows, stream);
    case QuantType::kQ4_1:
      return launch<T, QuantType::kQ4_1>(work, rows, stream);
    case QuantType::kQ5_0:
      return launch<T, QuantType::kQ5_0>(work, rows, stream);
    case QuantType::kQ5_1:
      return launch<T, QuantType::kQ5_1>(work, rows, stream);
    case QuantType::kQ8_0:
      return launch<T, QuantType::kQ8_0>(work, rows, stream);
    case QuantType::kQ4_K:
      return launch<T, QuantType::kQ4_K>(work, rows, stream);
    case QuantType::kQ5_K:
      return launch<T, QuantType::kQ5_K>(work, rows, stream);
    case QuantType::kQ6_K:
      return launch<T, QuantType::kQ6_K>(work, rows, stream);
    case QuantType::kNf4:
    case QuantType::kFp4:
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t dequantize_blocks(const DequantizeFourBit& asked, Stream stream) {
  Work work{};
  int64_t rows = 0;
  for (int i = 0; i < asked.segment_count; ++i) {
    if (asked.segments[i].rows == 0) continue;
    work.segments[work.segment_count++] = asked.segments[i];
    rows += asked.segments[i].rows;
  }
  if (rows == 0 || asked.columns == 0) return cudaSuccess;
  work.columns = asked.columns;
  work.row_bytes = packed_bytes(asked.quant_type, asked.columns);
  work.row_stride = asked.row_stride;
  work.out = asked.out;
  switch (asked.type) {
    case Float::kFloat32:
      return launch_type<float>(work, rows, asked.quant_type, stream);
    case Float::kFloat16:
      return launch_type<__half>(work, rows, asked.quant_type, stream);
    case Float::kBFloat16:
      return launch_type<__nv_bfloat16>(work, rows, asked.quant_type, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace qlorapp::cuda
