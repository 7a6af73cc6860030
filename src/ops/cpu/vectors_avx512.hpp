// SPDX-License-Identifier: Apache-2.0
/// A block's levels and roundings to 16 bits in AVX-512 registers; in an unnamed namespace as float_bits.hpp is.
#pragma once

#include <immintrin.h>

#include "dequantize_4bit_loop.hpp"

namespace qlorapp::ops::cpu {
namespace {

[[gnu::always_inline]] inline __m512 scaled_book(const float* book, float scale) {
  return _mm512_mul_ps(_mm512_loadu_ps(book), _mm512_set1_ps(scale));
}
[[gnu::always_inline]] inline __m256i to_words(__m512 value, Float16 /*type*/) {
  return _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
[[gnu::always_inline]] inline __m256i to_words(__m512 value, BFloat16 /*type*/) {
  const __m512i bits = _mm512_castps_si512(value);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
  const __m512i words = _mm512_mask_mov_epi32(_mm512_srli_epi32(rounded, 16), _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q),
                                              _mm512_set1_epi32(0x7FC0));
  return _mm512_cvtepi32_epi16(words);
}
[[gnu::always_inline]] inline __m512 to_floats(__m256i words, Float16 /*type*/) { return _mm512_cvtph_ps(words); }
[[gnu::always_inline]] inline __m512 to_floats(__m256i words, BFloat16 /*type*/) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}

/// A rounding on the way.
template <Via via>
[[gnu::always_inline]] inline __m512 passed(__m512 value) {
  if constexpr (via == Via::kFloat16) return to_floats(to_words(value, Float16{}), Float16{});
  if constexpr (via == Via::kBFloat16) return to_floats(to_words(value, BFloat16{}), BFloat16{});
  return value;
}

/// Floats of a register, for the kernels that are written over instruction sets.
struct Vectors512 {
  using Vector = __m512;
  static constexpr int64_t kLanes = 16;

  static Vector zero() { return _mm512_setzero_ps(); }
  [[gnu::always_inline]] static Vector add(Vector sum, Vector a, Vector b) { return _mm512_fmadd_ps(a, b, sum); }
  [[gnu::always_inline]] static Vector load(const float* x) { return _mm512_loadu_ps(x); }
  template <class Value>
  [[gnu::always_inline]] static Vector load(const Value* x) {
    return to_floats(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)), Value{});
  }
};

}  // namespace
}  // namespace qlorapp::ops::cpu
