// SPDX-License-Identifier: Apache-2.0
/// The weight is dequantized a panel at a time, into a buffer that every panel reuses, right before the panel's GEMM.
///
/// x · Wᵀ takes panels of rows, each giving columns of y. x · W (the gradient) takes panels of columns, which give columns of
/// its result too: nothing is accumulated over panels, so the result is rounded once in every dtype.
#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <string_view>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include "../quantize_arguments.hpp"
#include "four_bit_work.hpp"

namespace qlorapp::ops {
namespace {

int64_t panel_bytes() {
  static const int64_t b = std::getenv("PANEL") ? std::atoll(std::getenv("PANEL")) : (int64_t{2} << 20);
  return b;
}
constexpr int64_t kGrain = int64_t{1} << 15;

/// One buffer a thread that calls, kept for its life.
void* panel_buffer(size_t bytes) {
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  thread_local std::unique_ptr<void, Free> buffer;
  thread_local size_t capacity = 0;
  if (bytes > capacity) {
    capacity = (bytes + 4095) / 4096 * 4096;
    buffer.reset(std::aligned_alloc(4096, capacity));
    TORCH_CHECK_WITH(OutOfMemoryError, buffer != nullptr, "[linear_4bit] no memory for a panel of ", capacity, " bytes.");
  }
  return buffer.get();
}

/// Elements of one side of a panel: as many as fit, in multiples of `step`, at least one step.
int64_t panel_side(int64_t other_side, int64_t element_size, int64_t step, int64_t limit) {
  const int64_t fitting = panel_bytes() / std::max<int64_t>(other_side * element_size, 1);
  return std::min(std::max(fitting / step * step, step), limit);
}

/// y (M, out) = [y +] x (M, in) · Wᵀ, or y (M, in) = [y +] x (M, out) · W, in the dtype that all three share.
void multiply(const at::Tensor& y, const at::Tensor& x, const FourBitWork& weight, int64_t rows, int64_t columns,
              bool transpose, bool accumulate) {
  const int64_t element_size = static_cast<int64_t>(y.element_size());
  const auto kernel = cpu::dequantize_4bit_kernel(cpu_isa());
  const cpu::Dequantize4bit& work = weight.work;
  const int64_t sides = transpose ? columns : rows;
  const int64_t length = transpose ? rows : columns;
  const int64_t side = panel_side(length, element_size, 64, sides);
  auto* const buffer = static_cast<std::byte*>(panel_buffer(static_cast<size_t>(side * length * element_size)));
  for (int64_t begin = 0; begin < sides; begin += side) {
    const int64_t count = std::min(side, sides - begin);
    if (transpose) {
      at::parallel_for(0, rows, std::max<int64_t>(kGrain / count, 1), [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
          const int64_t at = row * columns + begin;
          kernel(work, at, at + count, buffer + row * count * element_size);
        }
      });
    } else {
      at::parallel_for(0, count, std::max<int64_t>(kGrain / columns, 1), [&](int64_t first, int64_t last) {
        kernel(work, (begin + first) * columns, (begin + last) * columns, buffer + first * columns * element_size);
      });
    }
    const at::Tensor panel = transpose ? at::from_blob(buffer, {rows, count}, y.options())
                                       : at::from_blob(buffer, {count, columns}, y.options()).t();
    at::Tensor part = y.narrow(1, begin, count);
    if (accumulate) at::addmm_out(part, part, x, panel);
    else at::mm_out(part, x, panel);
  }
}

/// Whether a product of this dtype is better formed in fp32 from values rounded to it.
bool needs_float32(at::ScalarType dtype) { return dtype == at::kHalf || (dtype == at::kBFloat16 && !cpu_has_bf16_gemm()); }

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
  if (!needs_float32(dtype)) {
    multiply(y2, x2, four_bit_work(weight, dense_type_of(dtype)), rows, columns, transpose, accumulate);
    return;
  }
  const auto via = dtype == at::kHalf ? cpu::DenseType::kFloat32ViaFloat16 : cpu::DenseType::kFloat32ViaBFloat16;
  const at::Tensor sum = accumulate ? y2.to(at::kFloat) : at::empty({tokens, out}, y.options().dtype(at::kFloat));
  multiply(sum, x2.to(at::kFloat), four_bit_work(weight, via), rows, columns, transpose, accumulate);
  y2.copy_(sum);
}

at::Tensor linear_4bit(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& absmax,
                       const std::optional<at::Tensor>& nested_absmax, const std::optional<at::Tensor>& nested_offset,
                       at::IntArrayRef shape, int64_t block_size, int64_t nested_block_size, std::string_view quant_type,
                       bool transpose) {
  const FourBitArguments weight{packed, absmax, nested_absmax, nested_offset, shape, block_size, nested_block_size, quant_type};
  const at::SymDimVector sizes = check_linear_4bit("linear_4bit", x, weight, transpose);
  at::Tensor y = at::empty(C10_AS_INTARRAYREF_SLOW(sizes), x.options());
  linear_into(y, x, weight, transpose, /*accumulate=*/false);
  return y;
}

void linear_4bit_out(at::Tensor& y, const at::Tensor& x, const at::Tensor& packed, const at::Tensor& absmax,
                     const std::optional<at::Tensor>& nested_absmax, const std::optional<at::Tensor>& nested_offset,
                     at::IntArrayRef shape, int64_t block_size, int64_t nested_block_size, std::string_view quant_type,
                     bool transpose, bool accumulate) {
  const FourBitArguments weight{packed, absmax, nested_absmax, nested_offset, shape, block_size, nested_block_size, quant_type};
  check_linear_4bit_out("linear_4bit_out", y, x, weight, transpose);
  linear_into(y, x, weight, transpose, accumulate);
}

}  // namespace

TORCH_LIBRARY_IMPL(qlorapp, CPU, m) {
  m.impl("linear_4bit", linear_4bit);
  m.impl("linear_4bit_out", linear_4bit_out);
}

}  // namespace qlorapp::ops
