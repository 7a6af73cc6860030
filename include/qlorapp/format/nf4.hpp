// SPDX-License-Identifier: Apache-2.0
/// Kinds of quantized weights; the four-bit code books, their decision thresholds and their byte layout. Torch-free; constexpr. The one home of these
/// numbers.
///
/// A block of `block_size` consecutive elements (of the tensor flattened row by row; the last block may be short) is stored as
/// its largest magnitude `absmax`, fp32, and one code an element:
///     s = x * (1 / absmax)      in a full block        (both operations rounded to fp32, absmax not below kSmallestDivisor)
///     s = x / absmax            in a short last block
///     code = index of the nearest entry to s; a tie goes to the lower entry
/// and comes back as round_to_dtype(fp32(code_book[code] * absmax)). Two codes share a byte: element 2i has the HIGH nibble,
/// 2i + 1 the low one; an odd end is filled with the code of 0.
///
/// Source: Dettmers et al. 2023, arXiv:2305.14314 §3 and appendix E (NF4); the values, the thresholds (fp32 midpoints), the
/// short block and FP4's order are those of bitsandbytes 0.50 on the CPU, to which tests/python/test_four_bit_rule.py holds them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "qlorapp/core/error.hpp"

namespace qlorapp {

/// How a weight is stored: in four-bit codes of 16 values beside scales, or in ggml's blocks, which have their scales in them.
enum class QuantType : uint8_t {
  kNf4,   ///< Quantiles of a normal distribution, with an exact zero.
  kFp4,   ///< Sign, two exponent bits, one mantissa bit.
  kQ4_0,  ///< Blocks of a GGUF file: src/format/ggml_blocks.hpp.
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kQ8_0,
  kQ4_K,
  kQ5_K,
  kQ6_K,
};

/// nf4 and fp4: what follows about codes is about these.
[[nodiscard]] constexpr bool has_code_book(QuantType type) { return type <= QuantType::kFp4; }

using CodeBook = std::array<float, 16>;
using CodeThresholds = std::array<float, 15>;

/// NF4, ascending: eight quantiles up, seven down and an exact 0, divided by the largest.
inline constexpr CodeBook kNf4CodeBook{-1.0F,         -0.6961928F, -0.52507305F, -0.3949175F, -0.28444138F, -0.18477343F,
                                       -0.091050036F, 0.0F,        0.0795803F,   0.1609302F,  0.2461123F,   0.33791524F,
                                       0.44070983F,   0.562617F,   0.72295684F,  1.0F};

/// FP4 by bit pattern (sign, exponent, mantissa), not by value. Both zeros are positive.
inline constexpr CodeBook kFp4CodeBook{0.0F, 0.0625F / 12,  8.0F / 12,  1.0F,  4.0F / 12,  0.5F,  2.0F / 12,  0.25F,
                                       0.0F, -0.0625F / 12, -8.0F / 12, -1.0F, -4.0F / 12, -0.5F, -2.0F / 12, -0.25F};

/// Codes by ascending value. Of FP4's two zeros, code 0 comes first: it stands for values <= 0, code 8 for those above.
inline constexpr std::array<uint8_t, 16> kNf4Order{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
inline constexpr std::array<uint8_t, 16> kFp4Order{11, 10, 13, 12, 15, 14, 9, 0, 8, 1, 6, 7, 4, 5, 2, 3};

/// s belongs to the k-th smallest entry when k thresholds lie below it.
inline constexpr CodeThresholds kNf4Thresholds{-0.8480964F,  -0.6106329F,   -0.45999527F, -0.33967942F, -0.2346074F,
                                               -0.13791174F, -0.045525018F, 0.03979015F,  0.12025525F,  0.20352125F,
                                               0.29201376F,  0.38931254F,   0.50166345F,  0.6427869F,   0.86147845F};
inline constexpr CodeThresholds kFp4Thresholds{-0.8333334F, -0.5833334F,    -0.4166667F, -0.2916667F,   -0.20833334F,
                                               -0.0859375F, -0.0026041667F, 0.0F,        0.0026041667F, 0.0859375F,
                                               0.20833334F, 0.2916667F,     0.4166667F,  0.5833334F,    0.8333334F};

namespace detail {
constexpr bool are_midpoints(const CodeThresholds& thresholds, const CodeBook& book, const std::array<uint8_t, 16>& order) {
  for (size_t k = 0; k < thresholds.size(); ++k) {
    if (thresholds[k] != (book[order[k]] + book[order[k + 1]]) / 2.0F) return false;
    if (k > 0 && thresholds[k] <= thresholds[k - 1]) return false;
  }
  return true;
}
}  // namespace detail
static_assert(detail::are_midpoints(kNf4Thresholds, kNf4CodeBook, kNf4Order), "NF4 thresholds are the fp32 midpoints");
static_assert(detail::are_midpoints(kFp4Thresholds, kFp4CodeBook, kFp4Order), "FP4 thresholds are the fp32 midpoints");

/// The values that the 16 codes stand for.
[[nodiscard]] constexpr const CodeBook& code_book_of(QuantType type) {
  return type == QuantType::kNf4 ? kNf4CodeBook : kFp4CodeBook;
}
/// The midpoints between neighboring values, in ascending order.
[[nodiscard]] constexpr const CodeThresholds& code_thresholds_of(QuantType type) {
  return type == QuantType::kNf4 ? kNf4Thresholds : kFp4Thresholds;
}
[[nodiscard]] constexpr const std::array<uint8_t, 16>& code_order_of(QuantType type) {
  return type == QuantType::kNf4 ? kNf4Order : kFp4Order;
}

/// The divisor of a block is not smaller than this, so that a block of zeros divides by something (a subnormal).
inline constexpr float kSmallestDivisor = 1e-38F;

/// Code of an element that was divided by its block's absmax. NaN gives the code of the largest entry, as no threshold is
/// at or above it.
[[nodiscard]] constexpr uint8_t encode_scaled(QuantType type, float scaled) {
  const CodeThresholds& thresholds = code_thresholds_of(type);
  size_t rank = 0;
  for (const float threshold : thresholds) rank += threshold >= scaled ? 0U : 1U;
  return code_order_of(type)[rank];
}

/// Code of an exact zero, which also fills the last nibble of an odd number of elements: 7 in NF4, 0 in FP4.
[[nodiscard]] constexpr uint8_t zero_code(QuantType type) { return encode_scaled(type, 0.0F); }
static_assert(zero_code(QuantType::kNf4) == 7 && zero_code(QuantType::kFp4) == 0);

[[nodiscard]] constexpr uint8_t pack_codes(uint8_t even, uint8_t odd) { return static_cast<uint8_t>((even << 4U) | odd); }
[[nodiscard]] constexpr uint8_t even_code(uint8_t byte) { return static_cast<uint8_t>(byte >> 4U); }
[[nodiscard]] constexpr uint8_t odd_code(uint8_t byte) { return static_cast<uint8_t>(byte & 15U); }

/// Elements that one scale covers.
inline constexpr std::array<int64_t, 8> kBlockSizes{32, 64, 128, 256, 512, 1024, 2048, 4096};
inline constexpr int64_t kDefaultBlockSize = 64;
/// Whether kBlockSizes has it.
[[nodiscard]] constexpr bool is_block_size(int64_t size) {
  for (const int64_t known : kBlockSizes)
    if (size == known) return true;
  return false;
}

/// Bytes of the codes of n elements.
[[nodiscard]] constexpr int64_t packed_bytes(int64_t elements) { return elements / 2 + elements % 2; }
/// Scales of n elements.
[[nodiscard]] constexpr int64_t block_count(int64_t elements, int64_t block_size) {
  return elements / block_size + (elements % block_size == 0 ? 0 : 1);
}

/// ggml's blocks, in the order of QuantType.
struct BlockLayout {
  std::string_view name;
  int64_t elements, bytes;
};
inline constexpr std::array<BlockLayout, 8> kBlockLayouts{{{"q4_0", 32, 18},
                                                           {"q4_1", 32, 20},
                                                           {"q5_0", 32, 22},
                                                           {"q5_1", 32, 24},
                                                           {"q8_0", 32, 34},
                                                           {"q4_k", 256, 144},
                                                           {"q5_k", 256, 176},
                                                           {"q6_k", 256, 210}}};
/// Elements and bytes of a block. @param type  one without a code book.
[[nodiscard]] constexpr int64_t block_elements(QuantType type) {
  return kBlockLayouts[static_cast<size_t>(type) - static_cast<size_t>(QuantType::kQ4_0)].elements;
}
[[nodiscard]] constexpr int64_t block_bytes(QuantType type) {
  return kBlockLayouts[static_cast<size_t>(type) - static_cast<size_t>(QuantType::kQ4_0)].bytes;
}

/// The same for every type. @param elements  with blocks: a whole number of them.
[[nodiscard]] constexpr int64_t packed_bytes(QuantType type, int64_t elements) {
  return has_code_book(type) ? packed_bytes(elements) : elements / block_elements(type) * block_bytes(type);
}
/// Scales beside the codes: none with blocks.
[[nodiscard]] constexpr int64_t scale_count(QuantType type, int64_t elements, int64_t block_size) {
  return has_code_book(type) ? block_count(elements, block_size) : 0;
}

[[nodiscard]] constexpr std::string_view to_string(QuantType type) {
  if (type == QuantType::kNf4) return "nf4";
  if (type == QuantType::kFp4) return "fp4";
  return kBlockLayouts[static_cast<size_t>(type) - static_cast<size_t>(QuantType::kQ4_0)].name;
}

/// @param where  What the message begins with: an operator or a file.
/// @throws ValueError unless the name is "nf4" or "fp4".
[[nodiscard]] inline QuantType parse_quant_type(std::string_view name, std::string_view where) {
  if (name == "nf4") return QuantType::kNf4;
  if (name == "fp4") return QuantType::kFp4;
  throw ValueError("[" + std::string(where) + "] quant_type must be nf4 or fp4; got " + std::string(name) + ".");
}

}  // namespace qlorapp
