// SPDX-License-Identifier: Apache-2.0
#include <immintrin.h>

#include "quantize_4bit_kernel.hpp"
#include "quantize_4bit_loop.hpp"

namespace qlorapp::ops::cpu {
namespace {

[[gnu::always_inline]] inline __m256i load_words(const void* x) { return _mm256_loadu_si256(static_cast<const __m256i*>(x)); }
[[gnu::always_inline]] inline __m512 load16(const float* x) { return _mm512_loadu_ps(x); }
[[gnu::always_inline]] inline __m512 load16(const Float16* x) { return _mm512_cvtph_ps(load_words(x)); }
[[gnu::always_inline]] inline __m512 load16(const BFloat16* x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_words(x)), 16));
}

template <class T>
struct Avx512 {
  static constexpr int64_t kStep = 32;
  // A binary search over the 15 thresholds: level k holds, at position `rank so far`, the threshold to compare with next.
  __m512 level8, level4, level2, level1;
  __m512i order;

  explicit Avx512(const Encoder& encoder) {
    const __m512 t = _mm512_loadu_ps(encoder.thresholds);
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    level8 = _mm512_set1_ps(encoder.thresholds[7]);
    level4 = _mm512_permutexvar_ps(_mm512_add_epi32(lane, _mm512_set1_epi32(3)), t);
    level2 = _mm512_permutexvar_ps(_mm512_add_epi32(lane, _mm512_set1_epi32(1)), t);
    level1 = t;
    order = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(encoder.order)));
  }

  uint32_t largest_magnitude(const T* x, int64_t n) const {
    const __m512i mask = _mm512_set1_epi32(static_cast<int>(kMagnitudeMask));
    __m512i a = _mm512_setzero_si512();
    __m512i b = a;
    for (int64_t i = 0; i < n; i += 32) {
      a = _mm512_max_epi32(a, _mm512_and_si512(_mm512_castps_si512(load16(x + i)), mask));
      b = _mm512_max_epi32(b, _mm512_and_si512(_mm512_castps_si512(load16(x + i + 16)), mask));
    }
    return static_cast<uint32_t>(_mm512_reduce_max_epi32(_mm512_max_epi32(a, b)));
  }

  /// Codes of sixteen values, packed into eight bytes.
  [[gnu::always_inline]] __m128i encode16(__m512 v) const {
    const __m512i eight = _mm512_set1_epi32(8);
    __m512i rank = _mm512_maskz_mov_epi32(_mm512_cmp_ps_mask(level8, v, _CMP_NGE_UQ), eight);
    __m512 next = _mm512_permutexvar_ps(rank, level4);
    rank = _mm512_mask_add_epi32(rank, _mm512_cmp_ps_mask(next, v, _CMP_NGE_UQ), rank, _mm512_set1_epi32(4));
    next = _mm512_permutexvar_ps(rank, level2);
    rank = _mm512_mask_add_epi32(rank, _mm512_cmp_ps_mask(next, v, _CMP_NGE_UQ), rank, _mm512_set1_epi32(2));
    next = _mm512_permutexvar_ps(rank, level1);
    rank = _mm512_mask_add_epi32(rank, _mm512_cmp_ps_mask(next, v, _CMP_NGE_UQ), rank, _mm512_set1_epi32(1));
    const __m512i codes = _mm512_permutexvar_epi32(rank, order);
    // A pair of elements is one 64-bit lane: even below, odd above.
    const __m512i pairs = _mm512_or_si512(_mm512_slli_epi64(codes, 4), _mm512_srli_epi64(codes, 32));
    return _mm512_cvtepi64_epi8(pairs);
  }

  void encode(const T* x, int64_t n, float factor, uint8_t* packed) const {
    const __m512 f = _mm512_set1_ps(factor);
    for (int64_t i = 0; i < n; i += 32) {
      const __m128i first = encode16(_mm512_mul_ps(load16(x + i), f));
      const __m128i second = encode16(_mm512_mul_ps(load16(x + i + 16), f));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(packed + i / 2), _mm_unpacklo_epi64(first, second));
    }
  }
};

}  // namespace

int64_t quantize_4bit_avx512(const Quantize4bit& work, int64_t block_begin, int64_t block_end) {
  return quantize_any<Avx512>(work, block_begin, block_end);
}

}  // namespace qlorapp::ops::cpu
