// SPDX-License-Identifier: Apache-2.0
/// The part of the dequantizer that all instruction sets share; included by each of them (see float_bits.hpp on why it is
/// in an unnamed namespace).
///
/// A policy `Vector<Out>` is built from the 16 values of a block and brings
///     void expand(const uint8_t* packed, int64_t n, Out* dense, bool stream)        n a multiple of kStep
#pragma once

#include <cstdint>

#include "dequantize_4bit_kernel.hpp"
#include "float_bits.hpp"

namespace qlorapp::ops::cpu {
namespace {

[[maybe_unused]] inline void round_to(float value, float& out) { out = value; }
[[maybe_unused]] inline void round_to(float value, double& out) { out = static_cast<double>(value); }
[[maybe_unused]] inline void round_to(float value, Float16& out) { out = to_float16(value); }
[[maybe_unused]] inline void round_to(float value, BFloat16& out) { out = to_bfloat16(value); }

/// Which 16-bit type the value passes through before it becomes an Out.
enum class Via : uint8_t { kNothing, kFloat16, kBFloat16 };

template <Via via>
inline float pass(float value) {
  if constexpr (via == Via::kFloat16) return to_float(to_float16(value));
  if constexpr (via == Via::kBFloat16) return to_float(to_bfloat16(value));
  return value;
}

/// The 16 values of a block in memory, for elements that no vector covers.
template <class Out>
struct Levels {
  Out values[16];

  [[nodiscard]] Out at(const uint8_t* packed, int64_t element) const {
    const uint8_t byte = packed[element / 2];
    return values[element % 2 == 0 ? byte >> 4U : byte & 15U];
  }
};

template <Via via, class Out>
inline void fill_levels(const float* book, float scale, Levels<Out>& levels) {
  for (int i = 0; i < 16; ++i) round_to(pass<via>(book[i] * scale), levels.values[i]);
}

template <template <class, Via> class Vector, class Out, Via via>
void dequantize_range(const Dequantize4bit& work, int64_t begin, int64_t end, Out* dense) {
  constexpr int64_t kChunk = 256;  // scales decoded at a time
  using Policy = Vector<Out, via>;
  float scales[kChunk];
  const float* const book = four_bit_code_book(work.quant_type);
  const int64_t first_block = begin / work.block_size;
  const int64_t last_block = (end - 1) / work.block_size;
  for (int64_t chunk = first_block; chunk <= last_block; chunk += kChunk) {
    const int64_t blocks = last_block - chunk + 1 < kChunk ? last_block - chunk + 1 : kChunk;
    block_scales(work, chunk, blocks, scales);
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t block_begin = (chunk + block) * work.block_size;
      int64_t at = block_begin > begin ? block_begin : begin;
      const int64_t stop = block_begin + work.block_size < end ? block_begin + work.block_size : end;
      Out* out = dense + (at - begin);
      const Policy vector(book, scales[block]);
      Levels<Out> levels;
      const bool ragged = at % 2 != 0 || (stop - at) % Policy::kStep != 0;
      if (ragged) fill_levels<via>(book, scales[block], levels);
      if (at % 2 != 0) *out++ = levels.at(work.packed, at++);
      const int64_t even = (stop - at) / Policy::kStep * Policy::kStep;
      vector.expand(work.packed + at / 2, even, out, work.stream);
      for (at += even, out += even; at < stop; ++at) *out++ = levels.at(work.packed, at);
    }
  }
}

template <template <class, Via> class Vector>
void dequantize_any(const Dequantize4bit& work, int64_t begin, int64_t end, void* dense) {
  if (begin >= end) return;
  switch (work.dense_type) {
    case DenseType::kFloat32:
      return dequantize_range<Vector, float, Via::kNothing>(work, begin, end, static_cast<float*>(dense));
    case DenseType::kFloat16:
      return dequantize_range<Vector, Float16, Via::kNothing>(work, begin, end, static_cast<Float16*>(dense));
    case DenseType::kBFloat16:
      return dequantize_range<Vector, BFloat16, Via::kNothing>(work, begin, end, static_cast<BFloat16*>(dense));
    case DenseType::kFloat32ViaFloat16:
      return dequantize_range<Vector, float, Via::kFloat16>(work, begin, end, static_cast<float*>(dense));
    case DenseType::kFloat32ViaBFloat16:
      return dequantize_range<Vector, float, Via::kBFloat16>(work, begin, end, static_cast<float*>(dense));
    case DenseType::kFloat64:
      return dequantize_range<Vector, double, Via::kNothing>(work, begin, end, static_cast<double*>(dense));
  }
}

/// One element at a time. Vector sets use it for fp64, too, which is only for gradient checks.
template <class Out, Via via>
struct ScalarLevels {
  static constexpr int64_t kStep = 2;
  Levels<Out> levels;
  ScalarLevels(const float* book, float scale) { fill_levels<via>(book, scale, levels); }
  void expand(const uint8_t* packed, int64_t n, Out* dense, bool /*stream*/) const {
    for (int64_t i = 0; i < n; i += 2) {
      dense[i] = levels.values[packed[i / 2] >> 4U];
      dense[i + 1] = levels.values[packed[i / 2] & 15U];
    }
  }
};

}  // namespace
}  // namespace qlorapp::ops::cpu
