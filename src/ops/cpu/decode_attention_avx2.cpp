// SPDX-License-Identifier: Apache-2.0
#include <immintrin.h>

#include "decode_attention_loop.hpp"
#include "vectors_avx2.hpp"

namespace qlorapp::ops::cpu {
namespace {

struct Heads256 : Vectors256 {
  static constexpr int kWidth = 2;  ///< Registers of a value that are summed at once.

  [[gnu::always_inline]] static Vector all(float x) { return _mm256_set1_ps(x); }
  [[gnu::always_inline]] static void store(float* to, Vector v) { _mm256_storeu_ps(to, v); }
  [[gnu::always_inline]] static Vector totals(const Vector (&v)[kLanes]) {
    Vector pairs[4], fours[2];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      pairs[i] = _mm256_add_ps(_mm256_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm256_unpackhi_ps(v[2 * i], v[2 * i + 1]));
    for (int i = 0; i < 2; ++i) {
      const __m256d a = _mm256_castps_pd(pairs[2 * i]), b = _mm256_castps_pd(pairs[2 * i + 1]);
      fours[i] = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)), _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)));
    }
    return _mm256_add_ps(_mm256_permute2f128_ps(fours[0], fours[1], 0x20), _mm256_permute2f128_ps(fours[0], fours[1], 0x31));
  }
};

}  // namespace

DecodeAttentionKernel decode_attention_avx2(DenseType type) { return decode_attention_of<Heads256>(type); }

}  // namespace qlorapp::ops::cpu
