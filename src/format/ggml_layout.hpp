// SPDX-License-Identifier: Apache-2.0
/// The bytes of ggml's blocks. Half a float is two bytes, little-endian.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

// The compiler makes one body per instruction set and the loader picks.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define QLORAPP_PER_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define QLORAPP_PER_CPU
#endif
// Into each of those bodies.
#define QLORAPP_INLINE __attribute__((always_inline)) inline

namespace qlorapp::format {

[[nodiscard]] QLORAPP_INLINE float from_half(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16, magnitude = half & 0x7fffu;
  if (magnitude < 0x0400u) {
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
  }
  const uint32_t exponent = magnitude < 0x7c00u ? 0x38000000u : 0x70000000u;  // infinity and NaN stay what they are
  return std::bit_cast<float>(sign | ((magnitude << 13) + exponent));
}

using Half = std::array<uint8_t, 2>;

struct BlockQ8_0 {
  Half d;
  std::array<int8_t, 32> q;
};
struct BlockQ4_0 {
  Half d;
  std::array<uint8_t, 16> q;
};
struct BlockQ4_1 {
  Half d, min;
  std::array<uint8_t, 16> q;
};
struct BlockQ5_0 {
  Half d;
  std::array<uint8_t, 4> high;
  std::array<uint8_t, 16> q;
};
struct BlockQ5_1 {
  Half d, min;
  std::array<uint8_t, 4> high;
  std::array<uint8_t, 16> q;
};
struct BlockQ4_K {
  Half d, min;
  std::array<uint8_t, 12> scales;
  std::array<uint8_t, 128> q;
};
struct BlockQ5_K {
  Half d, min;
  std::array<uint8_t, 12> scales;
  std::array<uint8_t, 32> high;
  std::array<uint8_t, 128> q;
};
struct BlockQ6_K {
  std::array<uint8_t, 128> low;
  std::array<uint8_t, 64> high;
  std::array<int8_t, 16> scales;
  Half d;
};

}  // namespace qlorapp::format
