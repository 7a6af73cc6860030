// SPDX-License-Identifier: Apache-2.0
/// fp16 and bf16 as bits, for kernels without torch. Rounding is to nearest, ties to even, as the hardware's.
///
/// Everything here is in an unnamed namespace on purpose: files compiled with AVX-512 flags include it, and a shared inline
/// function compiled there could be the copy that the linker keeps for every machine.
#pragma once

#include <cstdint>
#include <cstring>

namespace qlorapp::ops::cpu {
namespace {

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

[[maybe_unused]] inline uint32_t bits_of(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
[[maybe_unused]] inline float float_of(uint32_t bits) {
  float value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

[[maybe_unused]] inline float to_float(float value) { return value; }
[[maybe_unused]] inline float to_float(BFloat16 value) { return float_of(static_cast<uint32_t>(value.bits) << 16U); }
[[maybe_unused]] inline float to_float(Float16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000U) << 16U;
  const uint32_t magnitude = value.bits & 0x7FFFU;
  if (magnitude >= 0x7C00U)  // infinity, or NaN made quiet
    return float_of(sign | 0x7F800000U | ((magnitude & 0x3FFU) << 13U) | (magnitude > 0x7C00U ? 0x400000U : 0U));
  if (magnitude >= 0x400U) return float_of(sign | ((magnitude + 0x1C000U) << 13U));
  return float_of(sign | bits_of(static_cast<float>(magnitude) * 0x1p-24F));  // subnormal: exact
}

[[maybe_unused]] inline BFloat16 to_bfloat16(float value) {
  const uint32_t bits = bits_of(value);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return {0x7FC0U};  // as at::BFloat16
  return {static_cast<uint16_t>((bits + 0x7FFFU + ((bits >> 16U) & 1U)) >> 16U)};
}
[[maybe_unused]] inline Float16 to_float16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t sign = (bits >> 16U) & 0x8000U;
  const uint32_t magnitude = bits & 0x7FFFFFFFU;
  uint32_t half = 0;
  if (magnitude > 0x7F800000U) {
    half = 0x7E00U | ((magnitude >> 13U) & 0x3FFU);  // quiet NaN, payload kept, as F16C
  } else if (magnitude >= 0x477FF000U) {
    half = 0x7C00U;  // 65520 and above round to infinity
  } else if (magnitude >= 0x38800000U) {
    half = (magnitude - 0x38000000U + 0xFFFU + ((magnitude >> 13U) & 1U)) >> 13U;
  } else {
    // Adding 0.5 leaves the subnormal's bits, rounded by the addition itself, at the bottom of the sum.
    half = bits_of(float_of(magnitude) + 0.5F) - 0x3F000000U;
  }
  return {static_cast<uint16_t>(sign | half)};
}

}  // namespace
}  // namespace qlorapp::ops::cpu
