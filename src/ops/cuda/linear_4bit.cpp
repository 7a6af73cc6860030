// SPDX-License-Identifier: Apache-2.0
/// Few rows of x are multiplied straight from the codes (cuda/gemm_4bit.hpp). Otherwise the weight is dequantized into a
/// workspace, which the caching allocator hands out again for the next weight, and cuBLAS does the rest: from a few hundred
/// rows on that is the fastest way on every GPU (reference: bitsandbytes' own calibration), and the workspace is read by the
/// GEMM out of L2 where it fits.
#include <cstdint>
#include <string_view>

#include <ATen/ATen.h>
#include <c10/cuda/CUDAFunctions.h>
#include <torch/library.h>

#include "../linear_4bit_entry.hpp"
#include "../quantize_arguments.hpp"
#include "cuda/gemm_4bit.hpp"
#include "dequantize.hpp"
#include "launch.hpp"

namespace qlorapp::ops {
namespace {

bool is_aligned(const void* address, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(address) % bytes == 0; }

/// y (M, out), x (M, in). @returns false if this product is not for the fused kernel.
bool multiply_fused(const at::Tensor& y, const at::Tensor& x, const FourBitArguments& weight, bool accumulate) {
  if (x.scalar_type() != at::kHalf && x.scalar_type() != at::kBFloat16) return false;
  if (!has_code_book(checked_quant_type("linear_4bit", weight.quant_type))) return false;
  cuda::GemmFourBit work;
  work.type = gpu::float_type("linear_4bit", x);
  work.m = x.size(0);
  work.n = weight.shape[0];
  work.k = weight.shape[1];
  if (!cuda::prefers_gemm_4bit(work.m, work.n, work.k, weight.block_size, work.type, gpu::code_architecture())) return false;
  if (x.stride(1) != 1 || y.stride(1) != 1 || x.stride(0) % 8 != 0) return false;
  const gpu::FourBitMemory memory = gpu::four_bit_memory(weight);
  work.x = x.const_data_ptr();
  work.x_stride = x.stride(0);
  work.y = y.mutable_data_ptr();
  work.y_stride = y.stride(0);
  work.packed = memory.segment.packed;
  work.absmax = memory.segment.absmax;
  work.nested_absmax = memory.segment.nested_absmax;
  work.nested_offset = memory.segment.nested_offset;
  work.block_size = weight.block_size;
  work.nested_block_size = weight.nested_block_size;
  work.quant_type = checked_code_book("linear_4bit", weight.quant_type);
  work.accumulate = accumulate;
  if (!is_aligned(work.x, 16) || !is_aligned(work.packed, 8)) return false;
  const gpu::Launch launch(x);
  C10_CUDA_CHECK(cuda::gemm_4bit(work, launch.stream()));
  return true;
}

void linear_into(at::Tensor& y, const at::Tensor& x, const FourBitArguments& weight, bool transpose, bool accumulate) {
  const int64_t out = weight.shape[transpose ? 1 : 0];
  const int64_t in = weight.shape[transpose ? 0 : 1];
  const int64_t tokens = in == 0 ? (out == 0 ? 0 : y.numel() / out) : x.numel() / in;
  if (tokens == 0 || out == 0) return;
  const gpu::Launch launch(x);
  const at::Tensor x2 = x.reshape({tokens, in});
  at::Tensor y2 = y.dim() == 2 ? y : y.view({tokens, out});
  if (in == 0) {
    if (!accumulate) y2.zero_();
    return;
  }
  if (!transpose && multiply_fused(y2, x2, weight, accumulate)) return;
  const at::ScalarType dtype = x.scalar_type();
  at::Tensor dense = gpu::dequantized("linear_4bit", weight, dtype == at::kDouble ? at::kFloat : dtype);
  if (dtype == at::kDouble) dense = dense.to(dtype);
  const at::Tensor other = transpose ? dense : dense.t();
  if (accumulate) at::addmm_out(y2, y2, x2, other);
  else at::mm_out(y2, x2, other);
}

}  // namespace

TORCH_LIBRARY_IMPL(qlorapp, CUDA, m) {
  m.impl("linear_4bit", linear_4bit_entry<linear_into>);
  m.impl("linear_4bit_out", linear_4bit_out_entry<linear_into>);
}

}  // namespace qlorapp::ops
