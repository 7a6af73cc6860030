// SPDX-License-Identifier: Apache-2.0
#include "ops/lora_augment.hpp"

#include <ATen/ATen.h>
#include <torch/library.h>

#include "four_bit_stack.hpp"
#include "lora_augment_shapes.hpp"
#include "ops/operator.hpp"
#include "ops/quantize.hpp"

namespace qlorapp::ops {
namespace {

void write_borders(const at::Tensor& right, const at::Tensor& below, at::TensorList a, at::TensorList b,
                   at::ArrayRef<double> scaling) {
  right.zero_();
  below.zero_();
  int64_t row = 0, rank = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const int64_t rows = b[i].size(0), ranks = a[i].size(0);
    right.narrow(0, row, rows).narrow(1, rank, ranks).copy_(b[i] * scaling[i]);
    below.narrow(0, rank, ranks).copy_(a[i]);
    row += rows;
    rank += ranks;
  }
}

void lora_augment_cpu(at::Tensor& workspace, at::TensorList a, at::TensorList b, at::ArrayRef<double> scaling) {
  const AugmentShape shape = check_lora_augment(workspace, a, b, scaling);
  write_borders(workspace.narrow(0, 0, shape.out).narrow(1, shape.in, shape.spare),
                workspace.narrow(0, shape.out, shape.spare).narrow(1, 0, shape.in), a, b, scaling);
}

void lora_borders_cpu(at::Tensor& right, at::Tensor& below, at::TensorList a, at::TensorList b, at::ArrayRef<double> scaling) {
  check_lora_borders(right, below, a, b, scaling);
  write_borders(right, below, a, b, scaling);
}

void lora_borders_meta(at::Tensor& right, at::Tensor& below, at::TensorList a, at::TensorList b, at::ArrayRef<double> scaling) {
  check_lora_borders(right, below, a, b, scaling);
}

void lora_augment_meta(at::Tensor& workspace, at::TensorList a, at::TensorList b, at::ArrayRef<double> scaling) {
  check_lora_augment(workspace, a, b, scaling);
}

void augmented_cpu(at::Tensor& workspace, at::TensorList packed, at::TensorList absmax, at::TensorList nested_absmax,
                   at::TensorList nested_offset, at::IntArrayRef rows, int64_t block_size, int64_t nested_block_size,
                   std::string_view quant_type, at::TensorList a, at::TensorList b, at::ArrayRef<double> scaling) {
  const AugmentShape shape = check_lora_augment(workspace, a, b, scaling);
  check_augmented_rows(rows, b);
  dequantize_4bit_stack_(workspace.narrow(0, 0, shape.out).narrow(1, 0, shape.in), packed, absmax, nested_absmax, nested_offset,
                         rows, block_size, nested_block_size, checked_quant_type("dequantize_4bit_augmented_", quant_type));
  lora_augment_cpu(workspace, a, b, scaling);
}

void augmented_meta(at::Tensor& workspace, at::TensorList packed, at::TensorList absmax, at::TensorList nested_absmax,
                    at::TensorList nested_offset, at::IntArrayRef rows, int64_t block_size, int64_t nested_block_size,
                    std::string_view quant_type, at::TensorList a, at::TensorList b, at::ArrayRef<double> scaling) {
  const AugmentShape shape = check_lora_augment(workspace, a, b, scaling);
  check_augmented_rows(rows, b);
  check_four_bit_stack("dequantize_4bit_augmented_", workspace.narrow(0, 0, shape.out).narrow(1, 0, shape.in),
                       {packed, absmax, nested_absmax, nested_offset, rows, block_size, nested_block_size, quant_type});
}

}  // namespace

void dequantize_4bit_augmented_(at::Tensor& workspace, at::TensorList packed, at::TensorList absmax, at::TensorList nested_absmax,
                                at::TensorList nested_offset, at::IntArrayRef rows, int64_t block_size, int64_t nested_block_size,
                                QuantType quant_type, at::TensorList a, at::TensorList b, at::ArrayRef<double> scaling) {
  static const auto op =
      Operator<void(at::Tensor&, at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::IntArrayRef, int64_t, int64_t,
                    std::string_view, at::TensorList, at::TensorList, at::ArrayRef<double>)>("qlorapp::dequantize_4bit_augmented_");
  op.call(workspace, packed, absmax, nested_absmax, nested_offset, rows, block_size, nested_block_size, to_string(quant_type), a, b,
          scaling);
}

void lora_augment_(at::Tensor& workspace, at::TensorList a, at::TensorList b, at::ArrayRef<double> scaling) {
  static const auto op =
      Operator<void(at::Tensor&, at::TensorList, at::TensorList, at::ArrayRef<double>)>("qlorapp::lora_augment_");
  op.call(workspace, a, b, scaling);
}

void lora_borders_(at::Tensor& right, at::Tensor& below, at::TensorList a, at::TensorList b, at::ArrayRef<double> scaling) {
  static const auto op =
      Operator<void(at::Tensor&, at::Tensor&, at::TensorList, at::TensorList, at::ArrayRef<double>)>("qlorapp::lora_borders_");
  op.call(right, below, a, b, scaling);
}

TORCH_LIBRARY_IMPL(qlorapp, CPU, m) {
  m.impl("lora_borders_", lora_borders_cpu);
  m.impl("lora_augment_", lora_augment_cpu);
  m.impl("dequantize_4bit_augmented_", augmented_cpu);
}
TORCH_LIBRARY_IMPL(qlorapp, Meta, m) {
  m.impl("lora_borders_", lora_borders_meta);
  m.impl("lora_augment_", lora_augment_meta);
  m.impl("dequantize_4bit_augmented_", augmented_meta);
}

}  // namespace qlorapp::ops
