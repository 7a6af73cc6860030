// SPDX-License-Identifier: Apache-2.0
#include <immintrin.h>

#include "few_rows_loop.hpp"

namespace qlorapp::ops::cpu {
namespace {

/// Pairs of bfloat16, two products a lane. A block's values lie twice in one register, so that a lookup by words looks at four bits
/// of its index only.
struct Pairs512 {
  using Element = uint16_t;
  using Vector = __m512i;
  using Sum = __m512;
  static constexpr int64_t kLanes = 32;
  static constexpr int rows_at_once(int tokens, bool dense) { return tokens <= 4 ? 4 : dense ? 3 : 2; }

  struct Levels {
    __m512i values;
    Levels() = default;
    Levels(const float* book, float scale) {
      const __m512 one = _mm512_castsi512_ps(_mm512_loadu_si512(book));
      const __m512 scaled = _mm512_mul_ps(one, _mm512_set1_ps(scale));
      values = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(scaled, scaled));
    }
  };

  static uint16_t convert(BFloat16 value) { return value.bits; }
  static Sum zero() { return _mm512_setzero_ps(); }
  static float total(Sum sum) { return _mm512_reduce_add_ps(sum); }
  [[gnu::always_inline]] static Vector load(const uint16_t* x) { return _mm512_loadu_si512(x); }
  [[gnu::always_inline]] static Sum add(Sum sum, Vector weights, Vector x) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(weights), reinterpret_cast<__m512bh>(x));
  }
  [[gnu::always_inline]] static __m512i bytes(const uint8_t* packed) {
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(packed)));
  }
  [[gnu::always_inline]] static Vector odd(__m512i bytes, const Levels& levels) {
    return _mm512_permutexvar_epi16(bytes, levels.values);
  }
  [[gnu::always_inline]] static Vector even(__m512i bytes, const Levels& levels) {
    return _mm512_permutexvar_epi16(_mm512_srli_epi16(bytes, 4), levels.values);
  }
  [[gnu::always_inline]] static Vector widen(const uint16_t* weights) { return _mm512_loadu_si512(weights); }
};

}  // namespace

FewRowsKernel few_rows_avx512_bf16(const FewRows& work) {
  if (work.dense != nullptr) return kernel_of<Pairs512, DenseRow<Pairs512>, BFloat16>();
  return kernel_of<Pairs512, FourBitRow<Pairs512>, BFloat16>();
}

}  // namespace qlorapp::ops::cpu
