// SPDX-License-Identifier: Apache-2.0
/// The format's tables in device memory (values: format/nf4.hpp, format/dynamic_map.hpp) and the decoding of nested scales.
#pragma once

#include <cstdint>

#include "format/double_quant.hpp"
#include "qlorapp/format/nf4.hpp"

namespace qlorapp::cuda {
namespace {

/// In memory of its own 128-byte line each: 32 lanes fetch one with one access.
struct alignas(128) DeviceBook {
  float values[16];
};
struct alignas(128) DeviceMap {
  float values[256];
};

constexpr DeviceBook make_book(const CodeBook& book) {
  DeviceBook result{};
  for (size_t i = 0; i < 16; ++i) result.values[i] = book[i];
  return result;
}
constexpr DeviceMap make_map(const DynamicMap& map) {
  DeviceMap result{};
  for (size_t i = 0; i < 256; ++i) result.values[i] = map[i];
  return result;
}

__device__ const DeviceBook kDeviceNf4 = make_book(kNf4CodeBook);
__device__ const DeviceBook kDeviceFp4 = make_book(kFp4CodeBook);
__device__ const DeviceMap kDeviceSignedMap = make_map(kSignedDynamicMap);
[[maybe_unused]] __device__ const DeviceMap kDeviceUnsignedMap = make_map(kUnsignedDynamicMap);

__device__ __forceinline__ float book_entry(QuantType type, unsigned code) {
  return __ldg((type == QuantType::kNf4 ? kDeviceNf4 : kDeviceFp4).values + code);
}

/// A divisor that is mostly a power of two: a shift where it is, else -1 and a division.
struct Divisor {
  int64_t value;
  int shift;
};
inline Divisor make_divisor(int64_t value) {
  int shift = 0;
  while ((int64_t{1} << shift) < value) ++shift;
  return {value, (int64_t{1} << shift) == value ? shift : -1};
}
__device__ __forceinline__ int64_t divide(int64_t n, Divisor by) { return by.shift >= 0 ? n >> by.shift : n / by.value; }

/// As decode_scale() of format/double_quant.hpp: two roundings, never fused.
__device__ __forceinline__ float decode_scale_rn(float entry, float nested_absmax, float offset) {
  return __fadd_rn(__fmul_rn(entry, nested_absmax), offset);
}

}  // namespace
}  // namespace qlorapp::cuda
