// SPDX-License-Identifier: Apache-2.0
#include <immintrin.h>

#include "dequantize_4bit_kernel.hpp"
#include "dequantize_4bit_loop.hpp"
#include "vectors_avx2.hpp"

namespace qlorapp::ops::cpu {
namespace {

template <bool stream>
[[gnu::always_inline]] inline void store(float* out, __m256 value) {
  if constexpr (stream) _mm256_stream_ps(out, value);
  else _mm256_storeu_ps(out, value);
}
template <bool stream>
[[gnu::always_inline]] inline void store(void* out, __m256i value) {
  if constexpr (stream) _mm256_stream_si256(static_cast<__m256i*>(out), value);
  else _mm256_storeu_si256(static_cast<__m256i*>(out), value);
}
bool is_aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 32 == 0; }

/// A block's values in 16 bits, cut into two tables of bytes, because a byte shuffle is the widest lookup that AVX2 has.
struct BytePlanes {
  __m256i low, high;

  BytePlanes(__m128i first, __m128i second) {
    const __m128i byte = _mm_set1_epi16(0xFF);
    low = _mm256_broadcastsi128_si256(_mm_packus_epi16(_mm_and_si128(first, byte), _mm_and_si128(second, byte)));
    high = _mm256_broadcastsi128_si256(_mm_packus_epi16(_mm_srli_epi16(first, 8), _mm_srli_epi16(second, 8)));
  }

  template <bool stream>
  void expand(const uint8_t* packed, int64_t n, uint16_t* dense) const {
    const __m128i nibble = _mm_set1_epi8(15);
    for (int64_t i = 0; i < n; i += 32) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(packed + i / 2));
      const __m128i even = _mm_and_si128(_mm_srli_epi16(bytes, 4), nibble);
      const __m128i odd = _mm_and_si128(bytes, nibble);
      const __m256i codes = _mm256_set_m128i(_mm_unpackhi_epi8(even, odd), _mm_unpacklo_epi8(even, odd));
      const __m256i low_bytes = _mm256_shuffle_epi8(low, codes);
      const __m256i high_bytes = _mm256_shuffle_epi8(high, codes);
      const __m256i a = _mm256_unpacklo_epi8(low_bytes, high_bytes);  // elements 0–7 and 16–23
      const __m256i b = _mm256_unpackhi_epi8(low_bytes, high_bytes);  // elements 8–15 and 24–31
      store<stream>(dense + i, _mm256_permute2x128_si256(a, b, 0x20));
      store<stream>(dense + i + 16, _mm256_permute2x128_si256(a, b, 0x31));
    }
  }
};

template <class Out, Via via>
struct Avx2 {
  static constexpr int64_t kStep = 32;
  BytePlanes planes;

  Avx2(const float* book, float scale)
      : planes(to_words(scaled_book(book, scale), Out{}), to_words(scaled_book(book + 8, scale), Out{})) {}
  void expand(const uint8_t* packed, int64_t n, Out* dense, bool stream) const {
    uint16_t* const out = &dense->bits;
    if (stream && is_aligned(out)) planes.expand<true>(packed, n, out);
    else planes.expand<false>(packed, n, out);
  }
};

template <Via via>
struct Avx2<float, via> {
  static constexpr int64_t kStep = 32;
  __m256 low, high;

  Avx2(const float* book, float scale) {
    low = passed<via>(scaled_book(book, scale));
    high = passed<via>(scaled_book(book + 8, scale));
  }

  template <bool stream>
  void expand_to(const uint8_t* packed, int64_t n, float* dense) const {
    for (int64_t i = 0; i < n; i += 8) {
      // A byte in each 64-bit lane: its high nibble for the even element below, its low nibble for the odd one above.
      const __m256i byte = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(load4(packed + i / 2)));
      const __m256i code = _mm256_or_si256(_mm256_srli_epi64(byte, 4), _mm256_slli_epi64(byte, 32));
      const __m256 from_low = _mm256_permutevar8x32_ps(low, code);    // looks at three bits of the code
      const __m256 from_high = _mm256_permutevar8x32_ps(high, code);  // and the fourth chooses
      const __m256 fourth = _mm256_castsi256_ps(_mm256_slli_epi32(code, 28));
      store<stream>(dense + i, _mm256_blendv_ps(from_low, from_high, fourth));
    }
  }
  static int load4(const uint8_t* bytes) {
    int value = 0;
    std::memcpy(&value, bytes, sizeof value);
    return value;
  }
  void expand(const uint8_t* packed, int64_t n, float* dense, bool stream) const {
    if (stream && is_aligned(dense)) expand_to<true>(packed, n, dense);
    else expand_to<false>(packed, n, dense);
  }
};

template <Via via>
struct Avx2<double, via> : ScalarLevels<double, via> {
  using ScalarLevels<double, via>::ScalarLevels;
};

}  // namespace

void dequantize_4bit_avx2(const Dequantize4bit& work, int64_t begin, int64_t end, void* dense) {
  dequantize_any<Avx2>(work, begin, end, dense);
  if (work.stream) _mm_sfence();
}

}  // namespace qlorapp::ops::cpu
