// SPDX-License-Identifier: Apache-2.0
/// Four-bit weights (format/nf4.hpp, format/double_quant.hpp) to dense ones, plain or double-quantized, in one launch.
///
/// Why one kernel: nested scales decoded in registers save two launches, an fp32 copy of the scales and their traffic, and
/// several weights that share an input (q·k·v, gate·up) are stacked by rows straight into the operand of one GEMM, whose rows
/// may have spare columns behind them ([W | B]).
///
///     scale = fp32(map[code] · nested_absmax) + offset       two roundings
///     value = round_to_dtype(fp32(book[code] · scale))
/// Bit-equal to the CPU operator. NaN scales give NaN, whose payload is not compared.
#pragma once

#include <driver_types.h>

#include <cstdint>

#include "lora_augment.hpp"
#include "qlorapp/format/nf4.hpp"
#include "types.hpp"

namespace qlorapp::cuda {

/// One weight of a stack.
struct FourBitSegment {
  const uint8_t* packed = nullptr;       ///< Codes of rows · columns elements; blocks run over them flattened.
  const void* absmax = nullptr;          ///< float32 scales, or their uint8 codes if `nested_absmax` is set.
  const float* nested_absmax = nullptr;  ///< One for nested_block_size codes, or null.
  const float* nested_offset = nullptr;  ///< One number, in device memory.
  int64_t rows = 0;
  int64_t first_row = 0;  ///< Of the output.
};

inline constexpr int kMaxFourBitSegments = 8;

struct DequantizeFourBit {
  FourBitSegment segments[kMaxFourBitSegments];  ///< All nested or none.
  int segment_count = 0;
  int64_t columns = 0;
  int64_t block_size = 64;  ///< 32, 64, … 4096.
  int64_t nested_block_size = 256;
  QuantType quant_type = QuantType::kNf4;
  Float type = Float::kFloat32;
  void* out = nullptr;
  int64_t row_stride = 0;  ///< In elements; at least `columns`.
  Augmentation borders;    ///< Adapters to be laid around what is written to `out`, whose row 0 is theirs; none if its count is 0.
};

/// Fast where packed is aligned to 4 bytes and every output row to 16; right everywhere, beyond 2^31 elements too. Fast borders
/// of whole 8 spare columns are written by the same launch. Asynchronous; allocates nothing.
[[nodiscard]] cudaError_t dequantize_4bit(const DequantizeFourBit& work, Stream stream);

}  // namespace qlorapp::cuda
