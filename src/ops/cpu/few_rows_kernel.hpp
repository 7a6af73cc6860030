// SPDX-License-Identifier: Apache-2.0
/// y (M, N) = x (M, K) · Wᵀ of few rows of x, on plain memory: no torch, no threads.
///
/// A GEMM wants W dense in memory; with few rows, forming it takes longer than the product. Here each value of W is formed in a
/// register and multiplied with every row of x while it is there, so that W is read once, in four bits. The values are those that
/// dequantize_4bit gives in the dtype of x. Sums are in float32, in an order that depends on K alone: a row of y has the same bits
/// independently of the other rows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dequantize_4bit_kernel.hpp"

namespace qlorapp::ops::cpu {

struct FewRows {
  Dequantize4bit four_bit;          ///< W, unless there is
  const uint16_t* dense = nullptr;  ///< (N, K) in 16 bits,
  int64_t dense_stride = 0;         ///< whose rows are so many elements apart.

  DenseType type = DenseType::kFloat32;  ///< Of x, y and W's values: float32, float16 or bfloat16. float32: W in four bits.
  int64_t columns = 0;                   ///< K, a multiple of kFewRowsUnit up to kFewRowsColumns.
  int64_t tokens = 0;                    ///< M, at least 1.
  const void* x = nullptr;
  int64_t x_stride = 0;  ///< Elements between rows.
  void* y = nullptr;
  int64_t y_stride = 0;
  bool accumulate = false;   ///< Adds to y, with one rounding.
  void* arranged = nullptr;  ///< x in the order of the kernel's registers: M · K floats at a multiple of 64 bytes.
};

/// Columns that a kernel takes at a time. A block of W may not end within them.
inline constexpr int64_t kFewRowsUnit = 64;
/// The most columns: scales of some rows of W are on the stack.
inline constexpr int64_t kFewRowsColumns = int64_t{1} << 16;

struct FewRowsKernel {
  void (*arrange)(const FewRows& work) = nullptr;                               ///< Once, before
  void (*multiply)(const FewRows& work, int64_t begin, int64_t end) = nullptr;  ///< rows [begin, end) of W.
};

/// Null without one: four-bit weights in ggml's blocks, CPUs without AVX2.
[[nodiscard]] FewRowsKernel few_rows_kernel(CpuIsa isa, const FewRows& work);

// One per instruction set; call them through few_rows_kernel().
FewRowsKernel few_rows_avx2(const FewRows& work);
FewRowsKernel few_rows_avx512(const FewRows& work);
FewRowsKernel few_rows_avx512_bf16(const FewRows& work);  ///< bfloat16 only.

}  // namespace qlorapp::ops::cpu
