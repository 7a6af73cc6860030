// SPDX-License-Identifier: Apache-2.0
/// The weight is dequantized a panel at a time, into a buffer that every panel reuses, right before the panel's GEMM.
///
/// x · Wᵀ takes panels of rows, each giving columns of y. x · W (the gradient) adds up what panels of rows give, in fp32 and
/// fp64; in 16 bits it takes panels of columns instead. Where the CPU has no 16-bit products, sums are in fp32. So no dtype
/// rounds more than once.
///
/// Few rows of x are multiplied with the packed weight instead (few_rows.hpp).
#include <algorithm>
#include <cstddef>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include "../linear_4bit_entry.hpp"
#include "../quantize_arguments.hpp"
#include "few_rows.hpp"
#include "four_bit_work.hpp"
#include "gemm.hpp"
#include "panel_buffer.hpp"

namespace qlorapp::ops {
namespace {

/// Large enough that a GEMM does not notice the cut (it packs x once a panel), small enough to stay in the caches.
/// benchmarks/dequantize.py prints linear_4bit beside a dense GEMM.
constexpr int64_t kPanelBytes = int64_t{4} << 20;
constexpr int64_t kProductGrain = int64_t{1} << 15;

/// Rows or columns of a panel: as many as fit, in multiples of 64 so that blocks are not cut, at least 64.
int64_t panel_side(int64_t other_side, int64_t element_size, int64_t limit) {
  constexpr int64_t kStep = 64;
  return std::min(std::max(kPanelBytes / (other_side * element_size) / kStep, int64_t{1}) * kStep, limit);
}

/// Calls use(panel, begin, count) with rows [begin, begin + count) of the weight.
template <class Use>
void for_row_panels(const cpu::Dequantize4bit& work, int64_t rows, int64_t columns, const at::TensorOptions& options, Use&& use) {
  const auto element_size = static_cast<int64_t>(options.dtype().itemsize());
  const auto kernel = cpu::dequantize_4bit_kernel(cpu_isa(), work.quant_type);
  const int64_t side = panel_side(columns, element_size, rows);
  auto* const buffer = static_cast<std::byte*>(cpu::panel_buffer(static_cast<size_t>(side * columns * element_size)));
  for (int64_t begin = 0; begin < rows; begin += side) {
    const int64_t count = std::min(side, rows - begin);
    at::parallel_for(0, count, std::max<int64_t>(kProductGrain / columns, 1), [&](int64_t first, int64_t last) {
      kernel(work, (begin + first) * columns, (begin + last) * columns, buffer + first * columns * element_size);
    });
    use(at::from_blob(buffer, {count, columns}, options), begin, count);
  }
}

/// The same with columns [begin, begin + count).
template <class Use>
void for_column_panels(const cpu::Dequantize4bit& work, int64_t rows, int64_t columns, const at::TensorOptions& options,
                       Use&& use) {
  const auto element_size = static_cast<int64_t>(options.dtype().itemsize());
  const auto kernel = cpu::dequantize_4bit_kernel(cpu_isa(), work.quant_type);
  const int64_t side = panel_side(rows, element_size, columns);
  auto* const buffer = static_cast<std::byte*>(cpu::panel_buffer(static_cast<size_t>(side * rows * element_size)));
  for (int64_t begin = 0; begin < columns; begin += side) {
    const int64_t count = std::min(side, columns - begin);
    at::parallel_for(0, rows, std::max<int64_t>(kProductGrain / count, 1), [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row)
        kernel(work, row * columns + begin, row * columns + begin + count, buffer + row * count * element_size);
    });
    use(at::from_blob(buffer, {rows, count}, options), begin, count);
  }
}

/// y = x · panel, or y += x · panel.
void product(at::Tensor y, const at::Tensor& x, const at::Tensor& panel, bool accumulate) {
  if (accumulate) at::addmm_out(y, y, x, panel);
  else at::mm_out(y, x, panel);
}

/// y (M, out) = [y +] x (M, in) · Wᵀ, or y (M, in) = [y +] x (M, out) · W, in the dtype that all three share.
void multiply(const at::Tensor& y, const at::Tensor& x, const FourBitWork& weight, int64_t rows, int64_t columns, bool transpose,
              bool accumulate) {
  const auto options = y.options();
  if (!transpose) {
    for_row_panels(weight.work, rows, columns, options, [&](const at::Tensor& panel, int64_t begin, int64_t count) {
      product(y.narrow(1, begin, count), x, panel.t(), accumulate);
    });
  } else if (y.scalar_type() == at::kFloat || y.scalar_type() == at::kDouble) {
    for_row_panels(weight.work, rows, columns, options, [&](const at::Tensor& panel, int64_t begin, int64_t count) {
      product(y, x.narrow(1, begin, count), panel, accumulate || begin > 0);
    });
  } else {
    for_column_panels(weight.work, rows, columns, options, [&](const at::Tensor& panel, int64_t begin, int64_t count) {
      product(y.narrow(1, begin, count), x, panel, accumulate);
    });
  }
}

void linear_into(const at::Tensor& y, const at::Tensor& x, const FourBitArguments& weight, bool transpose, bool accumulate) {
  const int64_t rows = weight.shape[0];
  const int64_t columns = weight.shape[1];
  const int64_t out = transpose ? columns : rows;
  const int64_t in = transpose ? rows : columns;
  const int64_t tokens = in == 0 ? (out == 0 ? 0 : y.numel() / out) : x.numel() / in;
  if (tokens == 0 || out == 0) return;
  const at::Tensor x2 = x.reshape({tokens, in});
  const at::Tensor y2 = y.dim() == 2 ? y : y.view({tokens, out});
  if (in == 0) {
    if (!accumulate) y2.zero_();
    return;
  }
  const at::ScalarType dtype = x.scalar_type();
  const bool natively = cpu::multiplies_natively(dtype);  // its first call bounds the cache of oneDNN
  if (!transpose && tokens <= cpu::kFewRows &&
      cpu::multiply_few_rows(y2, x2, four_bit_work(weight, dense_type_of(dtype)).work, rows, accumulate))
    return;
  if (natively) {
    multiply(y2, x2, four_bit_work(weight, dense_type_of(dtype)), rows, columns, transpose, accumulate);
    return;
  }
  const auto via = dtype == at::kHalf ? cpu::DenseType::kFloat32ViaFloat16 : cpu::DenseType::kFloat32ViaBFloat16;
  const at::Tensor sum = accumulate ? y2.to(at::kFloat) : at::empty({tokens, out}, y.options().dtype(at::kFloat));
  multiply(sum, x2.to(at::kFloat), four_bit_work(weight, via), rows, columns, transpose, accumulate);
  y2.copy_(sum);
}

}  // namespace

TORCH_LIBRARY_IMPL(qlorapp, CPU, m) {
  m.impl("linear_4bit", linear_4bit_entry<linear_into>);
  m.impl("linear_4bit_out", linear_4bit_out_entry<linear_into>);
}

}  // namespace qlorapp::ops
