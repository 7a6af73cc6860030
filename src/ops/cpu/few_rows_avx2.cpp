// SPDX-License-Identifier: Apache-2.0
#include <immintrin.h>

#include "few_rows_floats.hpp"
#include "vectors_avx2.hpp"

namespace qlorapp::ops::cpu {
namespace {

/// Eight floats; a block's values fill two registers, of which the fourth bit of a code chooses.
template <class Value>
struct Floats256 : Vectors256 {
  using Element = float;
  using Sum = Vector;
  static constexpr int rows_at_once(int tokens, bool /*dense*/) { return tokens <= 2 ? 2 : 1; }

  struct Levels {
    __m256 low, high;
    Levels() = default;
    Levels(const float* book, float scale)
        : low(passed<via_of<Value>()>(scaled_book(book, scale))), high(passed<via_of<Value>()>(scaled_book(book + 8, scale))) {}
  };

  static float convert(float value) { return value; }
  static float convert(BFloat16 value) { return to_float(value); }
  static float convert(Float16 value) { return _cvtsh_ss(value.bits); }
  static float total(Sum sum) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
  }
  [[gnu::always_inline]] static __m256i bytes(const uint8_t* packed) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(packed)));
  }
  /// @param fourth  a code's fourth bit in its sign.
  [[gnu::always_inline]] static Vector look_up(__m256i codes, __m256i fourth, const Levels& levels) {
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(levels.low, codes), _mm256_permutevar8x32_ps(levels.high, codes),
                            _mm256_castsi256_ps(fourth));
  }
  [[gnu::always_inline]] static Vector odd(__m256i bytes, const Levels& levels) {
    return look_up(bytes, _mm256_slli_epi32(bytes, 28), levels);
  }
  [[gnu::always_inline]] static Vector even(__m256i bytes, const Levels& levels) {
    return look_up(_mm256_srli_epi32(bytes, 4), _mm256_slli_epi32(bytes, 24), levels);
  }
  [[gnu::always_inline]] static Vector widen(const uint16_t* weights) {
    return Vectors256::load(reinterpret_cast<const Value*>(weights));
  }
};

}  // namespace

FewRowsKernel few_rows_avx2(const FewRows& work) { return kernel_of_floats<Floats256>(work); }

}  // namespace qlorapp::ops::cpu
