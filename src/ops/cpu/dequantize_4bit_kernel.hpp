// SPDX-License-Identifier: Apache-2.0
/// Four-bit codes back to numbers, on plain memory: no torch, no threads. Same bits from every instruction set.
///
/// A block's 16 possible values are formed once — fp32 product, rounded once to the output type — and looked up after that,
/// which gives exactly the value that multiplying each element would.
#pragma once

#include <cstdint>

#include "core/cpu_isa.hpp"
#include "format/double_quant.hpp"
#include "qlorapp/format/nf4.hpp"

namespace qlorapp::ops::cpu {

/// What comes out. The `Via` types are fp32 numbers that went through a rounding to 16 bits: what a 16-bit weight holds,
/// ready for an fp32 GEMM.
enum class DenseType : uint8_t { kFloat32, kFloat16, kBFloat16, kFloat32ViaFloat16, kFloat32ViaBFloat16, kFloat64 };

struct Dequantize4bit {
  const uint8_t* packed = nullptr;        ///< Codes of the whole weight.
  const float* absmax = nullptr;          ///< Scales of its blocks, or null with
  const uint8_t* absmax_codes = nullptr;  ///< their eight-bit codes,
  const float* nested_absmax = nullptr;   ///< the scales of those codes,
  float nested_offset = 0.0F;             ///< and what was subtracted before.
  int64_t nested_block_size = kDefaultNestedBlockSize;
  int64_t block_size = kDefaultBlockSize;
  QuantType quant_type = QuantType::kNf4;
  DenseType dense_type = DenseType::kFloat32;
  bool stream = false;  ///< Write past the caches: for results that are larger than they are.
};

/// Writes elements [begin, end) of the flattened weight; element `begin` goes to dense[0]. Any range, any block size.
using Dequantize4bitKernel = void (*)(const Dequantize4bit& work, int64_t begin, int64_t end, void* dense);

[[nodiscard]] Dequantize4bitKernel dequantize_4bit_kernel(CpuIsa isa, QuantType type);

// One per instruction set; call them through dequantize_4bit_kernel().
void dequantize_4bit_scalar(const Dequantize4bit& work, int64_t begin, int64_t end, void* dense);
void dequantize_4bit_avx2(const Dequantize4bit& work, int64_t begin, int64_t end, void* dense);
void dequantize_4bit_avx512(const Dequantize4bit& work, int64_t begin, int64_t end, void* dense);

/// Of weights in ggml's blocks; one for all instruction sets (format/ggml_blocks.cpp has one for each).
void dequantize_blocks(const Dequantize4bit& work, int64_t begin, int64_t end, void* dense);

/// Scales of blocks [block_begin, block_begin + count).
void block_scales(const Dequantize4bit& work, int64_t block_begin, int64_t count, float* scales);
/// The 16 values of a code book.
[[nodiscard]] const float* four_bit_code_book(QuantType type);

}  // namespace qlorapp::ops::cpu
