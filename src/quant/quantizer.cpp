// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/quant/quantizer.hpp"

#include <tuple>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "core/check.hpp"
#include "format/double_quant.hpp"
#include "format/ggml_blocks.hpp"
#include "nest_scales.hpp"
#include "ops/quantize.hpp"

namespace qlorapp {

static_assert(Quantizer::Options{}.nested_block_size == kDefaultNestedBlockSize);

Quantizer::Quantizer(const Options& options) : options_(options) {
  QLORAPP_CHECK_VALUE(is_block_size(options.block_size), "[Quantizer] block_size must be one of {}; got {}.", joined(kBlockSizes),
                      options.block_size);
  QLORAPP_CHECK_VALUE(options.nested_block_size > 0, "[Quantizer] nested_block_size must be above 0; got {}.",
                      options.nested_block_size);
}

void nest_scales(QuantizedTensor& weight, const Quantizer::Options& options) {
  if (!options.double_quant) return;
  weight.nested_offset = weight.absmax.numel() == 0 ? at::zeros({}, weight.absmax.options()) : at::mean(weight.absmax);
  const at::Tensor centered = weight.absmax - weight.nested_offset;
  std::tie(weight.absmax, weight.nested_absmax) = options.compat == Compat::kBnb
                                                      ? ops::quantize_blockwise_bnb(centered, weight.nested_block_size)
                                                      : ops::quantize_blockwise(centered, weight.nested_block_size);
}

namespace {

/// Rows become ggml's blocks, on the CPU.
void fill_blocks(QuantizedTensor& q, const at::Tensor& weight) {
  const int64_t columns = weight.dim() == 0 ? 1 : weight.size(-1), rows = columns == 0 ? 0 : weight.numel() / columns;
  const at::Tensor values = weight.to(at::kCPU, at::kFloat).contiguous();
  QLORAPP_CHECK_VALUE(columns % block_elements(q.quant_type) == 0, "[Quantizer] rows in {} must be whole blocks of {}; got {}.",
                      to_string(q.quant_type), block_elements(q.quant_type), columns);
  QLORAPP_CHECK_VALUE(values.isfinite().all().item<bool>(), "[Quantizer] weight must be finite; it holds inf or nan.");
  const int64_t row_bytes = packed_bytes(q.quant_type, columns);
  const at::Tensor packed = at::empty({rows * row_bytes, 1}, at::kByte);
  auto* const into = static_cast<std::byte*>(packed.mutable_data_ptr());
  const auto* const from = values.const_data_ptr<float>();
  at::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      format::quantize_row(format::gguf_type_of(q.quant_type), {from + row * columns, static_cast<size_t>(columns)}, {},
                           {into + row * row_bytes, static_cast<size_t>(row_bytes)});
    }
  });
  q.packed = packed.to(weight.device());
  q.absmax = at::empty({0}, weight.options().dtype(at::kFloat));
}

}  // namespace

Quantizer Quantizer::like(const QuantizedTensor& q, Compat compat) {
  return Quantizer({q.quant_type, q.block_size, q.double_quantized(), q.nested_block_size, compat});
}

QuantizedTensor Quantizer::quantize(const at::Tensor& weight) const {
  QLORAPP_CHECK_VALUE(weight.defined(), "[Quantizer] weight must be a float32, float16 or bfloat16 tensor; got an undefined one.");
  const bool bnb = options_.compat == Compat::kBnb;
  QuantizedTensor q;
  q.shape = weight.sizes().vec();
  q.dtype = weight.scalar_type();
  q.block_size = options_.block_size;
  q.nested_block_size = options_.nested_block_size;
  q.quant_type = options_.quant_type;
  if (!has_code_book(q.quant_type)) {
    fill_blocks(q, weight);
    return q;
  }
  std::tie(q.packed, q.absmax) =
      bnb ? ops::quantize_4bit_bnb(weight, q.block_size, q.quant_type) : ops::quantize_4bit(weight, q.block_size, q.quant_type);
  nest_scales(q, options_);
  return q;
}

at::Tensor Quantizer::dequantize(const QuantizedTensor& q, std::optional<at::ScalarType> dtype) const {
  QLORAPP_CHECK_VALUE(q.defined(), "[Quantizer] q must hold a weight; got an empty QuantizedTensor. quantize() makes one.");
  const at::ScalarType type = dtype.value_or(q.dtype);
  return q.double_quantized() ? ops::dequantize_4bit_nested(q.packed, q.absmax, q.nested_absmax, q.nested_offset, q.shape,
                                                            q.block_size, q.nested_block_size, q.quant_type, type)
                              : ops::dequantize_4bit(q.packed, q.absmax, q.shape, q.block_size, q.quant_type, type);
}

}  // namespace qlorapp
