// SPDX-License-Identifier: Apache-2.0
/// Elements of kernels: 16 bytes at a time between memory and float registers, for float, fp16 and bf16.
///
/// Arithmetic is always float. A conversion to 16 bits rounds to nearest, ties to even, as on the CPU; CUDA's own conversions
/// do it by integer arithmetic where a GPU (sm_75) lacks the bf16 instruction. Sums and products whose bits are compared with
/// the CPU's are written __fmul_rn, __fadd_rn, which the compiler never contracts into a fused multiply-add.
#pragma once

#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "types.hpp"

namespace qlorapp::cuda {
namespace {  // each file has its own: nothing here is a symbol that another could meet

using Half = __half;
using BFloat16 = __nv_bfloat16;

/// Elements in 16 bytes.
template <class T>
constexpr int kPack = 16 / static_cast<int>(sizeof(T));

template <class T>
__device__ inline float widen(T value) {
  if constexpr (std::is_same_v<T, Half>) return __half2float(value);
  else if constexpr (std::is_same_v<T, BFloat16>) return __bfloat162float(value);
  else return value;
}

template <class T>
__device__ inline T narrow(float value) {
  if constexpr (std::is_same_v<T, Half>) return __float2half_rn(value);
  else if constexpr (std::is_same_v<T, BFloat16>) return __float2bfloat16_rn(value);
  else return value;
}

/// The value after a round trip through T: a rounding point.
template <class T>
__device__ inline float rounded(float value) {
  return widen(narrow<T>(value));
}

template <class T>
__device__ inline uint4 load_raw(const T* source) {
  return *reinterpret_cast<const uint4*>(source);
}
template <class T>
__device__ inline void store_raw(T* target, uint4 raw) {
  *reinterpret_cast<uint4*>(target) = raw;
}

template <class T>
__device__ inline void unpack(uint4 raw, float (&values)[kPack<T>]) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (std::is_same_v<T, float>) {
      values[i] = __uint_as_float(words[i]);
    } else if constexpr (std::is_same_v<T, BFloat16>) {
      values[2 * i] = __uint_as_float(words[i] << 16);
      values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000U);
    } else {
      const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
      values[2 * i] = both.x;
      values[2 * i + 1] = both.y;
    }
  }
}

template <class T>
__device__ inline uint4 pack(const float (&values)[kPack<T>]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (std::is_same_v<T, float>) {
      words[i] = __float_as_uint(values[i]);
    } else if constexpr (std::is_same_v<T, BFloat16>) {
      const __nv_bfloat162 both = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
      words[i] = *reinterpret_cast<const uint32_t*>(&both);
    } else {
      const __half2 both = __floats2half2_rn(values[2 * i], values[2 * i + 1]);
      words[i] = *reinterpret_cast<const uint32_t*>(&both);
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

template <class T>
__device__ inline void load_pack(const T* source, float (&values)[kPack<T>]) {
  unpack<T>(load_raw(source), values);
}
template <class T>
__device__ inline void store_pack(T* target, const float (&values)[kPack<T>]) {
  store_raw(target, pack<T>(values));
}

/// Whether every row that begins at `data` and lies `stride` elements after the last can be read 16 bytes at a time.
template <class T>
bool aligned(const T* data, int64_t stride = 0) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % kPack<T> == 0;
}

/// f(T{}) for the element type that `type` names.
template <class F>
auto with_type(Float type, const F& f) {
  switch (type) {
    case Float::kFloat16:
      return f(Half{});
    case Float::kBFloat16:
      return f(BFloat16{});
    default:
      return f(float{});
  }
}

}  // namespace
}  // namespace qlorapp::cuda
