// SPDX-License-Identifier: Apache-2.0
/// Operands of products in eight bits (e4m3: 4 exponent and 3 mantissa bits, up to 448): see src/ops/float8.hpp.
#pragma once

#include <driver_types.h>

#include <cstdint>

#include "dequantize_4bit.hpp"
#include "types.hpp"

namespace qlorapp::cuda {

inline constexpr float kSmallestFloat8Row = 1e-30F;

/// Columns of a weight and rows of a stack's parts are multiples of this: a block of four-bit codes stays within its row.
inline constexpr int64_t kFloat8Step = 64;

/// value = e4m3(book[code] · scale of its block / weight_scale), the quotient as a product with 1 / weight_scale.
struct DequantizeToFloat8 {
  FourBitSegment segments[kMaxFourBitSegments];  ///< All nested or none; stacked by rows.
  int segment_count = 0;
  int64_t rows = 0;     ///< Of all segments together.
  int64_t columns = 0;  ///< A multiple of kFloat8Step.
  int64_t block_size = 64;
  int64_t nested_block_size = 256;
  QuantType quant_type = QuantType::kNf4;
  const float* weight_scale = nullptr;  ///< One number, in device memory.
  bool transpose = false;
  void* out = nullptr;  ///< (rows, columns), or (columns, rows) with `transpose`; dense, aligned to 16 bytes.
};
/// Asynchronous; allocates nothing.
[[nodiscard]] cudaError_t dequantize_to_float8(const DequantizeToFloat8& work, Stream stream);

/// scale = largest |x| of the row / 448; value = e4m3(x · (448 / largest)). A row whose largest is below kSmallestFloat8Row, whose
/// factor could leave float32, is a row of zeros with scale 1. NaN and infinity in a row
/// make its scale NaN or infinite.
struct QuantizeRowsToFloat8 {
  const void* x = nullptr;  ///< (rows, columns)
  Float type = Float::kBFloat16;
  int64_t rows = 0;
  int64_t columns = 0;                  ///< At most 32,768, a multiple of 16.
  int64_t row_stride = 0;               ///< Elements.
  const float* weight_scale = nullptr;  ///< Factor on every scale, one number in device memory, or null.
  void* values = nullptr;               ///< (rows, columns), dense.
  float* scale = nullptr;               ///< (rows)
};
[[nodiscard]] cudaError_t quantize_rows_to_float8(const QuantizeRowsToFloat8& work, Stream stream);

}  // namespace qlorapp::cuda
