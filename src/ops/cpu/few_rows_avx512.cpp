// SPDX-License-Identifier: Apache-2.0
#include <immintrin.h>

#include "few_rows_floats.hpp"
#include "vectors_avx512.hpp"

namespace qlorapp::ops::cpu {
namespace {

/// Sixteen floats; a block's values fill one register, whose lookup looks at four bits of its index only.
template <class Value>
struct Floats512 : Vectors512 {
  using Element = float;
  using Sum = Vector;
  static constexpr int rows_at_once(int tokens, bool dense) { return tokens <= 4 ? 4 : dense ? 3 : 2; }

  struct Levels {
    __m512 values;
    Levels() = default;
    Levels(const float* book, float scale) : values(passed<via_of<Value>()>(scaled_book(book, scale))) {}
  };

  static float convert(float value) { return value; }
  static float convert(BFloat16 value) { return to_float(value); }
  static float convert(Float16 value) { return _cvtsh_ss(value.bits); }
  static float total(Sum sum) { return _mm512_reduce_add_ps(sum); }
  [[gnu::always_inline]] static __m512i bytes(const uint8_t* packed) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(packed)));
  }
  [[gnu::always_inline]] static Vector odd(__m512i bytes, const Levels& levels) {
    return _mm512_permutexvar_ps(bytes, levels.values);
  }
  [[gnu::always_inline]] static Vector even(__m512i bytes, const Levels& levels) {
    return _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), levels.values);
  }
  [[gnu::always_inline]] static Vector widen(const uint16_t* weights) {
    return Vectors512::load(reinterpret_cast<const Value*>(weights));
  }
};

}  // namespace

FewRowsKernel few_rows_avx512(const FewRows& work) { return kernel_of_floats<Floats512>(work); }

}  // namespace qlorapp::ops::cpu
