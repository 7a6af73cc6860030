// SPDX-License-Identifier: Apache-2.0
#include <immintrin.h>

#include "dequantize_4bit_kernel.hpp"
#include "dequantize_4bit_loop.hpp"
#include "vectors_avx512.hpp"

namespace qlorapp::ops::cpu {
namespace {

template <bool stream>
[[gnu::always_inline]] inline void store(void* out, __m512i value) {
  if constexpr (stream) _mm512_stream_si512(static_cast<__m512i*>(out), value);
  else _mm512_storeu_si512(out, value);
}
bool is_aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 64 == 0; }

/// Sixteen bits: the block's values lie twice in one register, so that a word lookup needs four bits of its index only.
template <class Out, Via via>
struct Avx512 {
  static constexpr int64_t kStep = 32;
  __m512i values;

  Avx512(const float* book, float scale) { values = _mm512_broadcast_i64x4(to_words(scaled_book(book, scale), Out{})); }

  template <bool stream>
  void expand_to(const uint8_t* packed, int64_t n, Out* dense) const {
    for (int64_t i = 0; i < n; i += 32) {
      // A byte in each 32-bit lane: its high nibble for the even element below, its low nibble for the odd one above.
      const __m512i byte = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(packed + i / 2)));
      const __m512i code = _mm512_or_si512(_mm512_srli_epi32(byte, 4), _mm512_slli_epi32(byte, 16));
      store<stream>(dense + i, _mm512_permutexvar_epi16(code, values));
    }
  }
  void expand(const uint8_t* packed, int64_t n, Out* dense, bool stream) const {
    if (stream && is_aligned(dense)) expand_to<true>(packed, n, dense);
    else expand_to<false>(packed, n, dense);
  }
};

template <Via via>
struct Avx512<float, via> {
  static constexpr int64_t kStep = 32;
  __m512 values;

  Avx512(const float* book, float scale) { values = passed<via>(scaled_book(book, scale)); }

  template <bool stream>
  void expand_to(const uint8_t* packed, int64_t n, float* dense) const {
    for (int64_t i = 0; i < n; i += 16) {
      const __m512i byte = _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(packed + i / 2)));
      const __m512i code = _mm512_or_si512(_mm512_srli_epi64(byte, 4), _mm512_slli_epi64(byte, 32));
      store<stream>(dense + i, _mm512_castps_si512(_mm512_permutexvar_ps(code, values)));
    }
  }
  void expand(const uint8_t* packed, int64_t n, float* dense, bool stream) const {
    if (stream && is_aligned(dense)) expand_to<true>(packed, n, dense);
    else expand_to<false>(packed, n, dense);
  }
};

template <Via via>
struct Avx512<double, via> : ScalarLevels<double, via> {
  using ScalarLevels<double, via>::ScalarLevels;
};

}  // namespace

void dequantize_4bit_avx512(const Dequantize4bit& work, int64_t begin, int64_t end, void* dense) {
  dequantize_any<Avx512>(work, begin, end, dense);
  if (work.stream) _mm_sfence();
}

}  // namespace qlorapp::ops::cpu
