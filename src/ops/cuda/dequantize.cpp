// SPDX-License-Identifier: Apache-2.0
#include "dequantize.hpp"

#include <algorithm>
#include <string_view>

#include <ATen/ATen.h>
#include <torch/library.h>

#include "cuda/blockwise.hpp"
#include "launch.hpp"

namespace qlorapp::ops {
namespace gpu {

FourBitMemory four_bit_memory(const FourBitArguments& weight) {
  FourBitMemory memory{weight.packed.contiguous(), weight.absmax.contiguous(), {}, {}, {}};
  memory.segment.packed = memory.packed.const_data_ptr<uint8_t>();
  memory.segment.absmax = memory.absmax.const_data_ptr();
  if (weight.nested()) {
    memory.nested_absmax = weight.nested_absmax->contiguous();
    memory.nested_offset = *weight.nested_offset;
    memory.segment.nested_absmax = memory.nested_absmax.const_data_ptr<float>();
    memory.segment.nested_offset = memory.nested_offset.const_data_ptr<float>();
  }
  return memory;
}

namespace {

/// @param weights  segments that say how many rows each has; they are stacked in this order.
void launch_stack(const char* op, const at::Tensor& out, const std::vector<FourBitMemory>& weights, int64_t block_size,
                  int64_t nested_block_size, QuantType quant_type, int64_t columns, const cuda::Augmentation& borders = {}) {
  cuda::DequantizeFourBit work;
  work.columns = columns;
  work.block_size = block_size;
  work.nested_block_size = nested_block_size;
  work.quant_type = quant_type;
  work.type = float_type(op, out);
  work.out = out.mutable_data_ptr();
  work.row_stride = out.stride(0);
  const Launch launch(out);
  int64_t row = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    cuda::FourBitSegment& segment = work.segments[work.segment_count++];
    segment = weights[i].segment;
    segment.first_row = row;
    row += segment.rows;
    const bool last = i + 1 == weights.size();
    if (work.segment_count < cuda::kMaxFourBitSegments && !last) continue;
    if (last) work.borders = borders;
    C10_CUDA_CHECK(cuda::dequantize_4bit(work, launch.stream()));
    work.segment_count = 0;
  }
}

}  // namespace

void dequantize_stack(const char* op, const at::Tensor& out, const FourBitStack& stack, const cuda::Augmentation& borders) {
  check_four_bit_stack(op, out, stack);
  std::vector<FourBitMemory> weights;
  weights.reserve(stack.size());
  for (size_t i = 0; i < stack.size(); ++i) {
    const FourBitStack::Entry entry = stack.entry(i, out.size(1));
    weights.push_back(four_bit_memory(entry.arguments(stack)));
    weights.back().segment.rows = stack.rows[i];
  }
  launch_stack(op, out, weights, stack.block_size, stack.nested_block_size, checked_quant_type(op, stack.quant_type), out.size(1),
               borders);
}

at::Tensor dequantized(const char* op, const FourBitArguments& weight, at::ScalarType dtype) {
  at::Tensor dense = at::empty(weight.shape, weight.packed.options().dtype(dtype));
  const int64_t n = dense.numel();
  if (n == 0) return dense;
  std::vector<FourBitMemory> weights{four_bit_memory(weight)};
  weights[0].segment.rows = 1;
  launch_stack(op, dense.view({1, n}), weights, weight.block_size, weight.nested_block_size,
               checked_quant_type(op, weight.quant_type), n);
  return dense;
}

}  // namespace gpu

namespace {

at::Tensor dequantize(const char* op, const FourBitArguments& weight, at::ScalarType dtype) {
  check_dense_dtype(op, "dtype", dtype);
  check_four_bit(op, weight);
  const gpu::Launch launch(weight.packed);
  if (dtype == at::kDouble) return gpu::dequantized(op, weight, at::kFloat).to(dtype);
  return gpu::dequantized(op, weight, dtype);
}

at::Tensor dequantize_4bit(const at::Tensor& packed, const at::Tensor& absmax, at::IntArrayRef shape, int64_t block_size,
                           std::string_view quant_type, at::ScalarType dtype) {
  return dequantize("dequantize_4bit", {packed, absmax, std::nullopt, std::nullopt, shape, block_size, 0, quant_type}, dtype);
}

at::Tensor dequantize_4bit_nested(const at::Tensor& packed, const at::Tensor& absmax, const at::Tensor& nested_absmax,
                                  const at::Tensor& nested_offset, at::IntArrayRef shape, int64_t block_size,
                                  int64_t nested_block_size, std::string_view quant_type, at::ScalarType dtype) {
  const std::optional<at::Tensor> scales = nested_absmax;
  const std::optional<at::Tensor> offset = nested_offset;
  return dequantize("dequantize_4bit_nested", {packed, absmax, scales, offset, shape, block_size, nested_block_size, quant_type},
                    dtype);
}

void dequantize_4bit_stack_(at::Tensor& out, at::TensorList packed, at::TensorList absmax, at::TensorList nested_absmax,
                            at::TensorList nested_offset, at::IntArrayRef rows, int64_t block_size, int64_t nested_block_size,
                            std::string_view quant_type) {
  gpu::dequantize_stack("dequantize_4bit_stack_", out,
                        {packed, absmax, nested_absmax, nested_offset, rows, block_size, nested_block_size, quant_type});
}

at::Tensor dequantize_blockwise(const at::Tensor& codes, const at::Tensor& absmax, int64_t block_size, bool is_signed,
                                at::ScalarType dtype) {
  check_blockwise_codes("dequantize_blockwise", codes, absmax, block_size, dtype);
  const gpu::Launch launch(codes);
  const at::Tensor dense_codes = codes.contiguous();
  const at::Tensor scales = absmax.contiguous();
  at::Tensor values = at::empty(codes.sizes(), codes.options().dtype(dtype));
  if (values.numel() == 0) return values;
  cuda::DequantizeBlockwise work;
  work.codes = dense_codes.const_data_ptr<uint8_t>();
  work.absmax = scales.const_data_ptr<float>();
  work.n = codes.numel();
  work.block_size = block_size;
  work.is_signed = is_signed;
  work.type = gpu::float_type("dequantize_blockwise", values);
  work.out = values.mutable_data_ptr();
  C10_CUDA_CHECK(cuda::dequantize_blockwise(work, launch.stream()));
  return values;
}

}  // namespace

TORCH_LIBRARY_IMPL(qlorapp, CUDA, m) {
  m.impl("dequantize_4bit", dequantize_4bit);
  m.impl("dequantize_4bit_nested", dequantize_4bit_nested);
  m.impl("dequantize_4bit_stack_", dequantize_4bit_stack_);
  m.impl("dequantize_blockwise", dequantize_blockwise);
}

}  // namespace qlorapp::ops
