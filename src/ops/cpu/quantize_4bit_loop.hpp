// SPDX-License-Identifier: Apache-2.0
/// The part of the four-bit quantizer that all instruction sets share; included by each of them (see float_bits.hpp on why
/// it is in an unnamed namespace).
///
/// A policy `Vector` brings, for n a multiple of kStep:
///     uint32_t largest_magnitude(const T* x, int64_t n)           largest |x| as fp32 bits: NaN is above infinity
///     void encode(const T* x, int64_t n, float factor, uint8_t* packed)
#pragma once

#include <cstdint>

#include "float_bits.hpp"
#include "quantize_4bit_kernel.hpp"

namespace qlorapp::ops::cpu {
namespace {

constexpr uint32_t kInfinityBits = 0x7F800000U;
constexpr uint32_t kMagnitudeMask = 0x7FFFFFFFU;

/// Code of one scaled element; as encode_scaled() of format/nf4.hpp, without calling a shared inline function.
[[maybe_unused]] inline uint8_t encode_one(const Encoder& encoder, float scaled) {
  unsigned rank = 0;
  for (int i = 0; i < 15; ++i) rank += encoder.thresholds[i] >= scaled ? 0U : 1U;  // NaN: all 15
  return encoder.order[rank];
}

template <class T>
uint32_t largest_magnitude_scalar(const T* x, int64_t n) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t magnitude = bits_of(to_float(x[i])) & kMagnitudeMask;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

template <template <class> class Vector, class T>
int64_t quantize_blocks(const Quantize4bit& work, int64_t block_begin, int64_t block_end) {
  const Encoder& encoder = four_bit_encoder(work.quant_type);
  const Vector<T> vector(encoder);
  const T* const weight = static_cast<const T*>(work.weight);
  for (int64_t block = block_begin; block < block_end; ++block) {
    const int64_t begin = block * work.block_size;
    const int64_t count = work.n - begin < work.block_size ? work.n - begin : work.block_size;
    const bool full = count == work.block_size;
    const T* const x = weight + begin;
    uint8_t* const packed = work.packed + begin / 2;

    const int64_t even = count / Vector<T>::kStep * Vector<T>::kStep;
    uint32_t largest = vector.largest_magnitude(x, even);
    const uint32_t rest = largest_magnitude_scalar(x + even, count - even);
    largest = rest > largest ? rest : largest;
    if (largest >= kInfinityBits && !work.bnb_edges) return block;

    const float absmax = float_of(largest);
    const float divisor = absmax < kSmallestDivisor ? kSmallestDivisor : absmax;  // keeps NaN
    work.absmax[block] = full || (absmax == 0.0F && !work.bnb_edges) ? absmax : divisor;
    if (full) {
      vector.encode(x, count, 1.0F / divisor, packed);
      continue;
    }
    for (int64_t i = 0; i < count; i += 2) {
      const uint8_t low = i + 1 < count ? encode_one(encoder, to_float(x[i + 1]) / divisor) : encode_one(encoder, 0.0F);
      packed[i / 2] = static_cast<uint8_t>((encode_one(encoder, to_float(x[i]) / divisor) << 4U) | low);
    }
  }
  return -1;
}

template <template <class> class Vector>
int64_t quantize_any(const Quantize4bit& work, int64_t block_begin, int64_t block_end) {
  switch (work.weight_type) {
    case WeightType::kFloat32:
      return quantize_blocks<Vector, float>(work, block_begin, block_end);
    case WeightType::kFloat16:
      return quantize_blocks<Vector, Float16>(work, block_begin, block_end);
    case WeightType::kBFloat16:
      return quantize_blocks<Vector, BFloat16>(work, block_begin, block_end);
  }
  return -1;
}

}  // namespace
}  // namespace qlorapp::ops::cpu
