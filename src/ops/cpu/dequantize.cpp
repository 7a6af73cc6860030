// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <string_view>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include "../four_bit_stack.hpp"
#include "format/dynamic_map.hpp"
#include "four_bit_work.hpp"
#include "large_output.hpp"

namespace qlorapp::ops {

cpu::DenseType dense_type_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
      return cpu::DenseType::kFloat16;
    case at::kBFloat16:
      return cpu::DenseType::kBFloat16;
    case at::kDouble:
      return cpu::DenseType::kFloat64;
    default:
      return cpu::DenseType::kFloat32;
  }
}

FourBitWork four_bit_work(const FourBitArguments& weight, cpu::DenseType dense_type) {
  FourBitWork result{weight.packed.contiguous(), weight.absmax.contiguous(), {}, {}};
  cpu::Dequantize4bit& work = result.work;
  work.packed = result.packed.const_data_ptr<uint8_t>();
  work.block_size = weight.block_size;
  work.quant_type = checked_quant_type("dequantize_4bit", weight.quant_type);
  work.dense_type = dense_type;
  if (weight.nested()) {
    result.nested_absmax = weight.nested_absmax->contiguous();
    work.absmax_codes = result.absmax.const_data_ptr<uint8_t>();
    work.nested_absmax = result.nested_absmax.const_data_ptr<float>();
    work.nested_offset = *weight.nested_offset->const_data_ptr<float>();
    work.nested_block_size = weight.nested_block_size;
  } else {
    work.absmax = result.absmax.const_data_ptr<float>();
  }
  return result;
}

namespace {

/// Elements that are worth a thread.
constexpr int64_t kDequantizeGrain = int64_t{1} << 15;
/// Results above this leave the caches anyway, and are written past them.
constexpr int64_t kStreamBytes = int64_t{16} << 20;

at::Tensor dequantize(const char* op, const FourBitArguments& weight, at::ScalarType dtype) {
  check_dense_dtype(op, "dtype", dtype);
  const int64_t n = check_four_bit(op, weight);
  at::Tensor dense = empty_large(weight.shape, weight.packed.options().dtype(dtype));
  FourBitWork prepared = four_bit_work(weight, dense_type_of(dtype));
  const int64_t element = static_cast<int64_t>(dense.element_size());
  prepared.work.stream = n * element >= kStreamBytes;
  const auto kernel = cpu::dequantize_4bit_kernel(cpu_isa(), prepared.work.quant_type);
  auto* const out = static_cast<std::byte*>(dense.mutable_data_ptr());
  const int64_t block = weight.block_size;
  at::parallel_for(0, block_count(n, block), std::max<int64_t>(kDequantizeGrain / block, 1), [&](int64_t begin, int64_t end) {
    kernel(prepared.work, begin * block, std::min(end * block, n), out + begin * block * element);
  });
  return dense;
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
  const FourBitStack stack{packed, absmax, nested_absmax, nested_offset, rows, block_size, nested_block_size, quant_type};
  check_four_bit_stack("dequantize_4bit_stack_", out, stack);
  if (out.numel() == 0) return;
  const int64_t columns = out.size(1);
  const int64_t row_bytes = out.stride(0) * static_cast<int64_t>(out.element_size());
  const auto kernel = cpu::dequantize_4bit_kernel(cpu_isa(), checked_quant_type("dequantize_4bit_stack_", quant_type));
  auto* place = static_cast<std::byte*>(out.mutable_data_ptr());
  for (size_t i = 0; i < stack.size(); ++i) {
    const FourBitStack::Entry entry = stack.entry(i, columns);
    const FourBitWork prepared = four_bit_work(entry.arguments(stack), dense_type_of(out.scalar_type()));
    at::parallel_for(0, rows[i], std::max<int64_t>(kDequantizeGrain / columns, 1), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        kernel(prepared.work, row * columns, (row + 1) * columns, place + row * row_bytes);
    });
    place += rows[i] * row_bytes;
  }
}

at::Tensor dequantize_blockwise(const at::Tensor& codes, const at::Tensor& absmax, int64_t block_size, bool is_signed,
                                at::ScalarType dtype) {
  check_blockwise_codes("dequantize_blockwise", codes, absmax, block_size, dtype);
  const at::Tensor dense_codes = codes.contiguous();
  const at::Tensor scales = absmax.contiguous();
  at::Tensor values = at::empty(codes.sizes(), codes.options().dtype(at::kFloat));
  const int64_t n = codes.numel();
  const DynamicMap& map = is_signed ? signed_dynamic_map() : unsigned_dynamic_map();
  const auto* const in = dense_codes.const_data_ptr<uint8_t>();
  const auto* const scale = scales.const_data_ptr<float>();
  auto* const out = values.mutable_data_ptr<float>();
  at::parallel_for(0, block_count(n, block_size), std::max<int64_t>(kDequantizeGrain / block_size, 1),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t block = begin; block < end; ++block) {
                       const int64_t stop = std::min((block + 1) * block_size, n);
                       for (int64_t i = block * block_size; i < stop; ++i) out[i] = map[in[i]] * scale[block];
                     }
                   });
  return values.to(dtype);
}

}  // namespace

TORCH_LIBRARY_IMPL(qlorapp, CPU, m) {
  m.impl("dequantize_4bit", dequantize_4bit);
  m.impl("dequantize_4bit_nested", dequantize_4bit_nested);
  m.impl("dequantize_4bit_stack_", dequantize_4bit_stack_);
  m.impl("dequantize_blockwise", dequantize_blockwise);
}

}  // namespace qlorapp::ops
