// SPDX-License-Identifier: Apache-2.0
// Loops that become vector code for the CPU they run on, from one source, in a library that still runs on any x86-64.
//
// `vectorized(f)` calls f inlined into a function that may use AVX-512, into one that may use AVX2, or as it is. f is a lambda
// over plain loops; `#pragma omp simd` lets the compiler reorder a reduction, which it may not do by itself. Nothing here needs
// a libm call or a conversion instruction that the baseline lacks: exp and the 16-bit conversions are integer and float
// arithmetic without branches, so they vectorize wherever they are inlined and give the same bits on every CPU.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

namespace qlorapp::ops::simd {

#if defined(__x86_64__) && defined(__GNUC__)
template <class F>
[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,avx2"), gnu::flatten]] void inlined_for_avx512(const F& f) {
  f();
}
template <class F>
[[gnu::target("avx2"), gnu::flatten]] void inlined_for_avx2(const F& f) {
  f();
}
template <class F>
void vectorized(const F& f) {
  // Once a process: what the CPU has and the operating system saves on a context switch.
  static const int level = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
                               ? 2
                               : (__builtin_cpu_supports("avx2") ? 1 : 0);
  if (level == 2) return inlined_for_avx512(f);
  if (level == 1) return inlined_for_avx2(f);
  f();
}
#else
template <class F>
void vectorized(const F& f) {
  f();
}
#endif

/// The type in which a kernel computes on elements of type T.
template <class T>
using accumulate_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

/// condition ? yes : no without a branch: the compiler sinks one side of a plain selection into a branch, and the loop around
/// it stays scalar.
inline uint32_t select(bool condition, uint32_t yes, uint32_t no) {
  const uint32_t mask = ~(static_cast<uint32_t>(condition) - 1u);
  return (yes & mask) | (no & ~mask);
}

inline float widen(float value) { return value; }
inline double widen(double value) { return value; }
inline float widen(c10::BFloat16 value) { return std::bit_cast<float>(static_cast<uint32_t>(value.x) << 16); }
inline float widen(c10::Half value) {
  const uint32_t sign = static_cast<uint32_t>(value.x & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(value.x & 0x7fffu) << 13;
  // The exponent field sits in place but is biased by 15 instead of 127; the multiplication is exact, subnormals included.
  const uint32_t finite = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
  return std::bit_cast<float>(sign | select(magnitude >= (31u << 23), magnitude | 0x7f800000u, finite));
}

/// Rounds to nearest even, as every conversion of torch does.
template <class T>
T narrow(accumulate_t<T> value) {
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t quiet = select((bits & 0x7fffffffu) > 0x7f800000u, 0x7fc0u, 0u);  // rounding must not carry a NaN away
    return T(static_cast<uint16_t>(rounded | quiet), T::from_bits());
  } else if constexpr (std::is_same_v<T, c10::Half>) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    // Below 2^-14 a unit is 2^-24, which is the unit in the last place of 0.5: adding 0.5 rounds.
    const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
    uint32_t half = select(magnitude < 0x38800000u, subnormal, normal);
    half = select(magnitude >= 0x477ff000u, 0x7c00u, half);
    half = select(magnitude > 0x7f800000u, 0x7e00u, half);
    return T(static_cast<uint16_t>(half | ((bits >> 16) & 0x8000u)), T::from_bits());
  } else {
    return value;
  }
}

/// The value after a round trip through T: a rounding point.
template <class T>
accumulate_t<T> rounded(accumulate_t<T> value) {
  return widen(narrow<T>(value));
}

inline double exp(double value) { return std::exp(value); }
/// e^value within about 1 ulp; 0 and infinity beyond the range, NaN stays NaN. x = n·ln 2 + r, |r| <= ln 2 / 2.
inline float exp(float value) {
  float x = value < -104.0f ? -104.0f : value;
  x = x > 89.0f ? 89.0f : x;
  const float shifted = x * 0x1.715476p+0f + 0x1.8p23f;  // the integer n stands in the low bits
  const float n = shifted - 0x1.8p23f;
  const float r = (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;  // ln 2 in two parts; n times the first is exact
  // Taylor to r^7 / 7!: the remainder stays below 2^-27 on this interval.
  float p = 1.0f / 5040.0f;
  p = p * r + 1.0f / 720.0f;
  p = p * r + 1.0f / 120.0f;
  p = p * r + 1.0f / 24.0f;
  p = p * r + 1.0f / 6.0f;
  p = p * r + 0.5f;
  const float e = (p * (r * r) + r) + 1.0f;
  // 2^n in two factors, because n runs from -150 to 128.
  const int32_t k = std::bit_cast<int32_t>(shifted) - std::bit_cast<int32_t>(0x1.8p23f);
  const int32_t half = k >> 1;
  return e * std::bit_cast<float>((half + 127) << 23) * std::bit_cast<float>((k - half + 127) << 23);
}

}  // namespace qlorapp::ops::simd
