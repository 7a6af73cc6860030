// SPDX-License-Identifier: Apache-2.0
/// A warp quantizes a block: its scale first, its codes on a second reading, which the caches serve.
#include <algorithm>
#include <cstdint>

#include "blockwise.hpp"
#include "code_books.cuh"
#include "element.cuh"
#include "fast_math.cuh"

namespace qlorapp::cuda {
namespace {

constexpr int kThreads = 256;
constexpr unsigned kAllLanes = 0xFFFFFFFFU;

struct DeviceMidpoints {
  double values[256];  // the last is never compared with
};
constexpr DeviceMidpoints make_device_midpoints(const std::array<double, 255>& midpoints) {
  DeviceMidpoints result{};
  for (size_t i = 0; i < 255; ++i) result.values[i] = midpoints[i];
  return result;
}
__device__ const DeviceMidpoints kDeviceSignedMidpoints = make_device_midpoints(kSignedDynamicMidpoints);
__device__ const DeviceMidpoints kDeviceUnsignedMidpoints = make_device_midpoints(kUnsignedDynamicMidpoints);

/// Index of the nearest entry: how many midpoints lie below.
__device__ __forceinline__ uint8_t nearest_code(const double* midpoints, double value) {
  unsigned code = 0;
#pragma unroll
  for (unsigned half = 128; half > 0; half /= 2) code += value > midpoints[code + half - 1] ? half : 0U;
  return static_cast<uint8_t>(code);
}

/// Among entries 2j: the last whose lower neighbor is below; then the midpoints to its neighbors, in fp32.
__device__ __forceinline__ uint8_t bnb_code(const float* map, float value) {
  unsigned even = 0;
#pragma unroll
  for (unsigned half = 128; half > 1; half /= 2) even += value > map[even + half - 1] ? half : 0U;
  const float entry = map[even];
  if (value > entry) {
    const float middle = __fmul_rn(__fadd_rn(map[even + 1], entry), 0.5F);
    return static_cast<uint8_t>(value > middle ? even + 1 : even);
  }
  const unsigned lower = even == 0 ? 0 : even - 1;
  const float middle = __fmul_rn(__fadd_rn(map[lower], entry), 0.5F);
  return static_cast<uint8_t>(value < middle ? lower : even);
}

struct Work {
  const float* x;
  int64_t n;
  int64_t block_size;
  int64_t blocks;
  uint8_t* codes;
  float* absmax;
  unsigned long long* first_bad_block;
};

template <bool kSigned>
__global__ void __launch_bounds__(kThreads) quantize_nearest(const __grid_constant__ Work work) {
  __shared__ double midpoints[256];
  midpoints[threadIdx.x] = (kSigned ? kDeviceSignedMidpoints : kDeviceUnsignedMidpoints).values[threadIdx.x];
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x & 31U);
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kThreads / 32);
  for (int64_t block = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32U; block < work.blocks;
       block += warps) {
    const int64_t begin = block * work.block_size;
    const int64_t end = min(begin + work.block_size, work.n);
    uint32_t largest = 0;
    for (int64_t i = begin + lane; i < end; i += 32) largest = max(largest, __float_as_uint(work.x[i]) & 0x7FFFFFFFU);
    for (int distance = 16; distance > 0; distance /= 2) largest = max(largest, __shfl_xor_sync(kAllLanes, largest, distance));
    if (lane == 0) {
      work.absmax[block] = __uint_as_float(largest);
      if (largest >= 0x7F800000U && work.first_bad_block != nullptr)
        atomicMin(work.first_bad_block, static_cast<unsigned long long>(block));
    }
    const double divisor = largest == 0 ? 1.0 : static_cast<double>(__uint_as_float(largest));
    for (int64_t i = begin + lane; i < end; i += 32)
      work.codes[i] = nearest_code(midpoints, static_cast<double>(work.x[i]) / divisor);
  }
}

template <bool kSigned>
__global__ void __launch_bounds__(kThreads) quantize_bnb(const __grid_constant__ Work work) {
  __shared__ float map[256];
  map[threadIdx.x] = (kSigned ? kDeviceSignedMap : kDeviceUnsignedMap).values[threadIdx.x];
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x & 31U);
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kThreads / 32);
  for (int64_t block = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32U; block < work.blocks;
       block += warps) {
    const int64_t begin = block * work.block_size;
    const int64_t end = min(begin + work.block_size, work.n);
    float largest = __uint_as_float(0xFF7FFFFFU);  // -FLT_MAX
    for (int64_t i = begin + lane; i < end; i += 32) largest = fast_max(largest, fabsf(work.x[i]));
    for (int distance = 16; distance > 0; distance /= 2) largest = fast_max(largest, __shfl_xor_sync(kAllLanes, largest, distance));
    if (lane == 0) work.absmax[block] = largest;
    const float factor = fast_reciprocal(largest);
    for (int64_t i = begin + lane; i < end; i += 32) work.codes[i] = bnb_code(map, fast_product(work.x[i], factor));
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    expand(const uint8_t* codes, const float* absmax, int64_t n, Divisor block_size, bool is_signed, bool words, T* out) {
  __shared__ float map[256];
  map[threadIdx.x] = (is_signed ? kDeviceSignedMap : kDeviceUnsignedMap).values[threadIdx.x];
  __syncthreads();
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads * 4;
  for (int64_t at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * 4; at < n; at += stride) {
    const int count = static_cast<int>(min(n - at, int64_t{4}));
    uint32_t word = 0;
    if (words && count == 4) word = *reinterpret_cast<const uint32_t*>(codes + at);
    else
      for (int i = 0; i < count; ++i) word |= static_cast<uint32_t>(codes[at + i]) << (8 * i);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (i < count)
        out[at + i] = from_float<T>(__fmul_rn(map[(word >> (8 * i)) & 255U], __ldg(absmax + divide(at + i, block_size))));
  }
}

unsigned grid_for(int64_t blocks) { return static_cast<unsigned>(std::min<int64_t>(blocks, 1 << 16)); }

}  // namespace

cudaError_t quantize_blockwise(const QuantizeBlockwise& asked, Stream stream) {
  if (asked.n == 0) return cudaSuccess;
  const int64_t blocks = block_count(asked.n, asked.block_size);
  const Work work{asked.x, asked.n, asked.block_size, blocks, asked.codes, asked.absmax, asked.first_bad_block};
  const unsigned grid = grid_for((blocks + kThreads / 32 - 1) / (kThreads / 32));
  if (asked.rounding == DynamicCode::kNearest && asked.is_signed) quantize_nearest<true><<<grid, kThreads, 0, stream>>>(work);
  else if (asked.rounding == DynamicCode::kNearest) quantize_nearest<false><<<grid, kThreads, 0, stream>>>(work);
  else if (asked.is_signed) quantize_bnb<true><<<grid, kThreads, 0, stream>>>(work);
  else quantize_bnb<false><<<grid, kThreads, 0, stream>>>(work);
  return cudaGetLastError();
}

cudaError_t dequantize_blockwise(const DequantizeBlockwise& asked, Stream stream) {
  if (asked.n == 0) return cudaSuccess;
  const unsigned grid = grid_for((asked.n + kThreads * 4 - 1) / (kThreads * 4));
  const Divisor block = make_divisor(asked.block_size);
  const bool words = aligned_to(asked.codes, 4);
  const auto run = [&](auto* out) {
    expand<<<grid, kThreads, 0, stream>>>(asked.codes, asked.absmax, asked.n, block, asked.is_signed, words, out);
    return cudaGetLastError();
  };
  switch (asked.type) {
    case Float::kFloat32:
      return run(static_cast<float*>(asked.out));
    case Float::kFloat16:
      return run(static_cast<__half*>(asked.out));
    case Float::kBFloat16:
      return run(static_cast<__nv_bfloat16*>(asked.out));
  }
  return cudaErrorInvalidValue;
}

}  // namespace qlorapp::cuda
