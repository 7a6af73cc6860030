// SPDX-License-Identifier: Apache-2.0
/// A block's levels and roundings to 16 bits in AVX2 registers; in an unnamed namespace as float_bits.hpp is.
#pragma once

#include <immintrin.h>

#include "dequantize_4bit_loop.hpp"

namespace qlorapp::ops::cpu {
namespace {

[[gnu::always_inline]] inline __m256 scaled_book(const float* book, float scale) {
  return _mm256_mul_ps(_mm256_loadu_ps(book), _mm256_set1_ps(scale));
}
[[gnu::always_inline]] inline __m128i to_words(__m256 value, Float16 /*type*/) {
  return _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
[[gnu::always_inline]] inline __m128i to_words(__m256 value, BFloat16 /*type*/) {
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
  const __m256i words = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FC0), nan);
  return _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}
[[gnu::always_inline]] inline __m256 to_floats(__m128i words, Float16 /*type*/) { return _mm256_cvtph_ps(words); }
[[gnu::always_inline]] inline __m256 to_floats(__m128i words, BFloat16 /*type*/) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
}

/// A rounding on the way.
template <Via via>
[[gnu::always_inline]] inline __m256 passed(__m256 value) {
  if constexpr (via == Via::kFloat16) return to_floats(to_words(value, Float16{}), Float16{});
  if constexpr (via == Via::kBFloat16) return to_floats(to_words(value, BFloat16{}), BFloat16{});
  return value;
}

/// Floats of a register, for the kernels that are written over instruction sets.
struct Vectors256 {
  using Vector = __m256;
  static constexpr int64_t kLanes = 8;

  static Vector zero() { return _mm256_setzero_ps(); }
  [[gnu::always_inline]] static Vector add(Vector sum, Vector a, Vector b) { return _mm256_fmadd_ps(a, b, sum); }
  [[gnu::always_inline]] static Vector load(const float* x) { return _mm256_loadu_ps(x); }
  template <class Value>
  [[gnu::always_inline]] static Vector load(const Value* x) {
    return to_floats(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)), Value{});
  }
};

}  // namespace
}  // namespace qlorapp::ops::cpu
