// SPDX-License-Identifier: Apache-2.0
#include <immintrin.h>

#include "quantize_4bit_kernel.hpp"
#include "quantize_4bit_loop.hpp"

namespace qlorapp::ops::cpu {
namespace {

[[gnu::always_inline]] inline __m256 load8(const float* x) { return _mm256_loadu_ps(x); }
[[gnu::always_inline]] inline __m128i load_words(const void* x) { return _mm_loadu_si128(static_cast<const __m128i*>(x)); }
[[gnu::always_inline]] inline __m256 load8(const Float16* x) { return _mm256_cvtph_ps(load_words(x)); }
[[gnu::always_inline]] inline __m256 load8(const BFloat16* x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_words(x)), 16));
}

template <class T>
struct Avx2 {
  static constexpr int64_t kStep = 32;
  // A binary search over the 15 thresholds. Each level's candidates lie in one register, picked by the bits found so far.
  __m256 level8, level4_low, level4_high, level2, level1;
  __m256i order;

  explicit Avx2(const Encoder& encoder) {
    const float* t = encoder.thresholds;
    level8 = _mm256_set1_ps(t[7]);
    level4_low = _mm256_set1_ps(t[3]);
    level4_high = _mm256_set1_ps(t[11]);
    level2 = _mm256_setr_ps(t[1], t[5], t[9], t[13], 0, 0, 0, 0);
    level1 = _mm256_setr_ps(t[0], t[2], t[4], t[6], t[8], t[10], t[12], t[14]);
    order = _mm256_broadcastsi128_si256(load_words(encoder.order));
  }

  uint32_t largest_magnitude(const T* x, int64_t n) const {
    const __m256i mask = _mm256_set1_epi32(static_cast<int>(kMagnitudeMask));
    __m256i a = _mm256_setzero_si256();
    __m256i b = a;
    for (int64_t i = 0; i < n; i += 16) {
      a = _mm256_max_epi32(a, _mm256_and_si256(_mm256_castps_si256(load8(x + i)), mask));
      b = _mm256_max_epi32(b, _mm256_and_si256(_mm256_castps_si256(load8(x + i + 8)), mask));
    }
    a = _mm256_max_epi32(a, b);
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4E));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xB1));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(m));
  }

  /// Number of thresholds below each of eight values; 15 for NaN.
  [[gnu::always_inline]] __m256i rank8(__m256 v) const {
    const __m256 above8 = _mm256_cmp_ps(level8, v, _CMP_NGE_UQ);
    __m256i rank = _mm256_and_si256(_mm256_castps_si256(above8), _mm256_set1_epi32(8));
    const __m256 above4 = _mm256_cmp_ps(_mm256_blendv_ps(level4_low, level4_high, above8), v, _CMP_NGE_UQ);
    rank = _mm256_or_si256(rank, _mm256_and_si256(_mm256_castps_si256(above4), _mm256_set1_epi32(4)));
    const __m256 above2 = _mm256_cmp_ps(_mm256_permutevar8x32_ps(level2, _mm256_srli_epi32(rank, 2)), v, _CMP_NGE_UQ);
    rank = _mm256_or_si256(rank, _mm256_and_si256(_mm256_castps_si256(above2), _mm256_set1_epi32(2)));
    const __m256 above1 = _mm256_cmp_ps(_mm256_permutevar8x32_ps(level1, _mm256_srli_epi32(rank, 1)), v, _CMP_NGE_UQ);
    return _mm256_sub_epi32(rank, _mm256_castps_si256(above1));
  }

  void encode(const T* x, int64_t n, float factor, uint8_t* packed) const {
    const __m256 f = _mm256_set1_ps(factor);
    const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i sixteen_one = _mm256_set1_epi16(0x0110);  // even element * 16 + odd element
    for (int64_t i = 0; i < n; i += 32) {
      const __m256i r0 = rank8(_mm256_mul_ps(load8(x + i), f));
      const __m256i r1 = rank8(_mm256_mul_ps(load8(x + i + 8), f));
      const __m256i r2 = rank8(_mm256_mul_ps(load8(x + i + 16), f));
      const __m256i r3 = rank8(_mm256_mul_ps(load8(x + i + 24), f));
      __m256i ranks = _mm256_packus_epi16(_mm256_packs_epi32(r0, r1), _mm256_packs_epi32(r2, r3));
      ranks = _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(order, ranks), in_order);
      const __m256i pairs = _mm256_maddubs_epi16(ranks, sixteen_one);
      const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(pairs, pairs), 0x08);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(packed + i / 2), _mm256_castsi256_si128(bytes));
    }
  }
};

}  // namespace

int64_t quantize_4bit_avx2(const Quantize4bit& work, int64_t block_begin, int64_t block_end) {
  return quantize_any<Avx2>(work, block_begin, block_end);
}

}  // namespace qlorapp::ops::cpu
