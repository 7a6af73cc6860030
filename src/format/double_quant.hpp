// SPDX-License-Identifier: Apache-2.0
/// Double quantization: the fp32 scales of a four-bit weight, stored in eight bits themselves. Torch-free.
///
/// With offset = mean of all scales, v[i] = scale[i] - offset is cut into blocks of 256; a block stores its largest magnitude
/// (nested_absmax, fp32) and, for each value, the index of the nearest entry of the signed dynamic map times it:
///     scale[i] = dynamic_map[code[i]] * nested_absmax[i / 256] + offset          (two roundings, fp32, no FMA)
/// That takes 0.127 instead of 0.5 bit a weight at block size 64.
///
/// The same eight-bit blocks, over either map, hold the moments of the 8-bit optimizer and quantize_blockwise.
///
/// Source: Dettmers et al. 2023, arXiv:2305.14314 §3; layout of bitsandbytes' QuantState.
#pragma once

#include <cstdint>

#include "format/dynamic_map.hpp"

namespace qlorapp {

inline constexpr int64_t kDefaultNestedBlockSize = 256;

/// How a value becomes an eight-bit code.
enum class DynamicRounding : uint8_t {
  kNearest,  ///< The nearest entry, decided exactly (in double); a tie goes to the lower one; a block of zeros codes 0.
  /// As bitsandbytes' CPU library (0.50): the quotient is first rounded to a grid of 65,536 points, so codes near zero and
  /// near midpoints may be a neighbour's (0 becomes code 131 = 2.1e-5·absmax), and a block of zeros gets code 0 (-0.993·0).
  kBnbCpu,
};

/// Quantizes blocks [block_begin, block_end) of n values.
/// @param x       n values. kNearest trusts them to be finite; kBnbCpu ignores NaN in the maximum and codes it 0.
/// @param codes   n codes, those of the given blocks are written.
/// @param absmax  ceil(n / block_size) scales, likewise.
/// Synchronous, pure, throws nothing.
void encode_dynamic(DynamicRounding rounding, bool is_signed, const float* x, int64_t n, int64_t block_size, int64_t block_begin,
                    int64_t block_end, uint8_t* codes, float* absmax) noexcept;

/// One scale back from its code. Compile with -ffp-contract=off: the product and the sum are rounded each.
[[nodiscard]] constexpr float decode_scale(uint8_t code, float nested_absmax, float nested_offset) {
  const float product = kSignedDynamicMap[code] * nested_absmax;
  return product + nested_offset;
}

}  // namespace qlorapp
