// SPDX-License-Identifier: Apache-2.0
/// The four-bit quantizer on plain memory: no torch, no threads. Rule in format/nf4.hpp; same bits from every instruction set.
#pragma once

#include <cstdint>

#include "core/cpu_isa.hpp"
#include "qlorapp/format/nf4.hpp"

namespace qlorapp::ops::cpu {

/// What encoding needs of a code book, in plain arrays.
struct Encoder {
  float thresholds[16];  ///< 15, and a copy of the last.
  uint8_t order[16];     ///< Codes by ascending value.
};
[[nodiscard]] const Encoder& four_bit_encoder(QuantType type);

/// The dtype of a weight.
enum class WeightType : uint8_t { kFloat32, kFloat16, kBFloat16 };

struct Quantize4bit {
  const void* weight = nullptr;  ///< n elements of `weight_type`, dense.
  int64_t n = 0;
  int64_t block_size = kDefaultBlockSize;
  WeightType weight_type = WeightType::kFloat32;
  QuantType quant_type = QuantType::kNf4;
  /// False: a block of zeros has absmax 0, and a block that holds NaN or infinity ends the work.
  /// True: as bitsandbytes — a short last block's absmax is at least 1e-38, and NaN and infinity take their course.
  bool bnb_edges = false;
  uint8_t* packed = nullptr;  ///< ceil(n / 2) bytes.
  float* absmax = nullptr;    ///< ceil(n / block_size) scales.
};

/// Quantizes blocks [block_begin, block_end). Blocks hold an even number of elements, so ranges never share a byte.
/// @returns the first block with a NaN or an infinity, where it stopped; -1 if there is none (always with bnb_edges).
using Quantize4bitKernel = int64_t (*)(const Quantize4bit& work, int64_t block_begin, int64_t block_end);

[[nodiscard]] Quantize4bitKernel quantize_4bit_kernel(CpuIsa isa);

// One per instruction set; call them through quantize_4bit_kernel().
int64_t quantize_4bit_scalar(const Quantize4bit& work, int64_t block_begin, int64_t block_end);
int64_t quantize_4bit_avx2(const Quantize4bit& work, int64_t block_begin, int64_t block_end);
int64_t quantize_4bit_avx512(const Quantize4bit& work, int64_t block_begin, int64_t block_end);

}  // namespace qlorapp::ops::cpu
