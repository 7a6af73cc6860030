// SPDX-License-Identifier: Apache-2.0
/// y = x · Wᵀ for few rows of x, straight from four-bit codes: the weight is read once, in its packed form.
///
///     y[m][n] = round_to_dtype( Σ_b scale[n][b] · Σ_{k in b} dtype(book[code[n][k]]) · x[m][k]  [+ y[m][n]] )
/// The inner sums, over 64 elements of a block, are the tensor cores' (products exact, fp32 sums); scales stay fp32; sums over
/// blocks are fp32, in an order that depends on the shape alone. So the weight is rounded once, before its scale instead of
/// after it: relative to Σ |x · W| the error is at most 2^-11 in fp16 and 2^-8 in bf16, plus fp32 sums and the last rounding.
#pragma once

#include <driver_types.h>

#include <cstdint>

#include "qlorapp/format/nf4.hpp"
#include "types.hpp"

namespace qlorapp::cuda {

struct GemmFourBit {
  const void* x = nullptr;  ///< (m, k), rows `x_stride` apart; aligned to 16 bytes, as every row is.
  int64_t x_stride = 0;
  void* y = nullptr;  ///< (m, n), rows `y_stride` apart.
  int64_t y_stride = 0;
  Float type = Float::kFloat16;  ///< kFloat16 or kBFloat16, of x and y.
  int64_t m = 0, n = 0, k = 0;
  const uint8_t* packed = nullptr;  ///< (n, k) flattened; aligned to 8 bytes.
  const void* absmax = nullptr;     ///< float32, or uint8 codes if `nested_absmax` is set.
  const float* nested_absmax = nullptr;
  const float* nested_offset = nullptr;  ///< In device memory.
  int64_t block_size = 64;
  int64_t nested_block_size = 256;
  QuantType quant_type = QuantType::kNf4;
  bool accumulate = false;  ///< y += instead of y =.
};

/// Whether gemm_4bit takes such a product and is to be preferred to dequantizing and a dense GEMM.
/// @param arch  what code_architecture() says.
[[nodiscard]] bool prefers_gemm_4bit(int64_t m, int64_t n, int64_t k, int64_t block_size, Float type, int arch);

/// 10 · major + minor of the compute capability that the code which runs on the current device was written for: the device's
/// own, or less where the build has only older PTX, which the driver compiles and which has none of the newer instructions.
/// Asks the driver.
[[nodiscard]] int code_architecture();

/// @param work  such that prefers_gemm_4bit() holds and the alignments above.
/// Asynchronous; allocates nothing.
[[nodiscard]] cudaError_t gemm_4bit(const GemmFourBit& work, Stream stream);

}  // namespace qlorapp::cuda
