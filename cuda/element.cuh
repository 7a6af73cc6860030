// SPDX-License-Identifier: Apache-2.0
/// Elements in registers: to float, back with one rounding, and eight of them as 16-byte accesses.
///
/// fp16 and bf16 travel as bits, so that no bf16 arithmetic exists anywhere: sm_75 has none, and fp16 runs never meet any.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace qlorapp::cuda {
namespace {

template <class T>
__device__ __forceinline__ float to_float(T value);
template <>
__device__ __forceinline__ float to_float(float value) {
  return value;
}
template <>
__device__ __forceinline__ float to_float(__half value) {
  return __half2float(value);
}
template <>
__device__ __forceinline__ float to_float(__nv_bfloat16 value) {
  return __uint_as_float(static_cast<unsigned>(__bfloat16_as_ushort(value)) << 16U);
}

/// To nearest, ties to even.
template <class T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float(float value) {
  return value;
}
template <>
__device__ __forceinline__ __half from_float(float value) {
  return __float2half_rn(value);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float(float value) {
  return __float2bfloat16_rn(value);
}

/// Two neighbors in one register, the first in the low half.
template <class T>
__device__ __forceinline__ uint32_t pack_pair(float first, float second);
template <>
__device__ __forceinline__ uint32_t pack_pair<__half>(float first, float second) {
  const __half2 pair = __floats2half2_rn(first, second);
  uint32_t bits;
  memcpy(&bits, &pair, sizeof bits);
  return bits;
}
template <>
__device__ __forceinline__ uint32_t pack_pair<__nv_bfloat16>(float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  uint32_t bits;
  memcpy(&bits, &pair, sizeof bits);
  return bits;
}

/// Eight neighbors to a 16-byte aligned place. With kStream, of what the caches hold these lines are to leave first.
template <bool kStream, class T>
__device__ __forceinline__ void store_eight(T* out, const float (&v)[8]) {
  if constexpr (sizeof(T) == 4) {
    const float4 low = make_float4(v[0], v[1], v[2], v[3]);
    const float4 high = make_float4(v[4], v[5], v[6], v[7]);
    auto* const place = reinterpret_cast<float4*>(out);
    if constexpr (kStream) {
      __stcs(place, low);
      __stcs(place + 1, high);
    } else {
      place[0] = low;
      place[1] = high;
    }
  } else {
    const uint4 words =
        make_uint4(pack_pair<T>(v[0], v[1]), pack_pair<T>(v[2], v[3]), pack_pair<T>(v[4], v[5]), pack_pair<T>(v[6], v[7]));
    if constexpr (kStream) __stcs(reinterpret_cast<uint4*>(out), words);
    else *reinterpret_cast<uint4*>(out) = words;
  }
}

/// Reads that nothing will repeat: they pass L1 by.
__device__ __forceinline__ uint32_t read_once(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(value) : "l"(address));
  return value;
}
__device__ __forceinline__ uint4 read_once(const uint4* address) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}
__device__ __forceinline__ uint2 read_once(const uint2* address) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(address));
  return v;
}

/// Eight neighbors from a 16-byte aligned place.
template <class T>
__device__ __forceinline__ void load_eight(const T* in, float (&v)[8]) {
  const uint4 words = read_once(reinterpret_cast<const uint4*>(in));
  T elements[8];
  memcpy(elements, &words, sizeof words);
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = to_float(elements[i]);
}
__device__ __forceinline__ void load_eight(const float* in, float (&v)[8]) {
  const uint4 low = read_once(reinterpret_cast<const uint4*>(in));
  const uint4 high = read_once(reinterpret_cast<const uint4*>(in) + 1);
  memcpy(v, &low, sizeof low);
  memcpy(v + 4, &high, sizeof high);
}

[[maybe_unused]] inline bool aligned_to(const void* address, unsigned bytes) {
  return reinterpret_cast<uintptr_t>(address) % bytes == 0;
}

}  // namespace
}  // namespace qlorapp::cuda
