// SPDX-License-Identifier: Apache-2.0
#include <immintrin.h>

#include "decode_attention_loop.hpp"
#include "vectors_avx512.hpp"

namespace qlorapp::ops::cpu {
namespace {

struct Heads512 : Vectors512 {
  static constexpr int kWidth = 4;  ///< Registers of a value that are summed at once.

  [[gnu::always_inline]] static Vector all(float x) { return _mm512_set1_ps(x); }
  [[gnu::always_inline]] static void store(float* to, Vector v) { _mm512_storeu_ps(to, v); }
  /// A transposition that adds on the way: of the lanes that two registers' halves bring together one is kept.
  [[gnu::always_inline]] static Vector totals(const Vector (&v)[kLanes]) {
    Vector pairs[8], fours[4], eights[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i)
      pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
      fours[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    const auto halves = [](Vector a, Vector b) {
      return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
    };
    for (int i = 0; i < 2; ++i) eights[i] = halves(fours[2 * i], fours[2 * i + 1]);
    return halves(eights[0], eights[1]);
  }
};

}  // namespace

DecodeAttentionKernel decode_attention_avx512(DenseType type) { return decode_attention_of<Heads512>(type); }

}  // namespace qlorapp::ops::cpu
