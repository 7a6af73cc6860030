// SPDX-License-Identifier: Apache-2.0
#include "nn/float8_stack.hpp"

#include <vector>

#include <ATen/ATen.h>

#include "../adapters/products.hpp"
#include "core/check.hpp"
#include "ops/float8.hpp"
#include "ops/lora_augment.hpp"
#include "ops/memory_tape.hpp"
#include "ops/quantize.hpp"

namespace qlorapp {
namespace {

void product(at::Tensor& y, const at::Tensor& x, const Float8Scales& scales, const at::Tensor& weights) {
  const auto [values, scale] = ops::quantize_rows_float8(x, scales.weight);
  ops::float8_product_out(y, values, scale, weights, scales.ones);
}

}  // namespace

Float8Stack::Float8Stack(std::span<const FrozenWeight> weights, std::span<const std::optional<LoraAdapter>> adapters,
                         const Float8Scales& scales)
    : weights_(weights), adapters_(adapters), scales_(scales), in_(weights.front().in_features()) {
  for (const FrozenWeight& weight : weights_) out_ += weight.out_features();
  for (const auto& adapter : adapters_) rank_ += adapter ? adapter->a.size(0) : 0;
}

std::string Float8Stack::obstacle(std::span<const FrozenWeight> weights) {
  const QuantizedTensor& first = weights.front().quantized;
  for (const FrozenWeight& weight : weights) {
    const QuantizedTensor& own = weight.quantized;
    if (!own.defined() || !has_code_book(own.quant_type)) return "a weight is not four-bit";
    if (own.shape[0] % ops::kFloat8WeightStep != 0 || own.shape[1] % ops::kFloat8WeightStep != 0) {
      return message("a weight is ({}, {}), not multiples of {}", own.shape[0], own.shape[1], ops::kFloat8WeightStep);
    }
    if (own.block_size != first.block_size || own.quant_type != first.quant_type || own.block_size > own.shape[1] ||
        own.double_quantized() != first.double_quantized() || own.nested_block_size != first.nested_block_size) {
      return "weights that share an input are quantized in different ways, or in blocks longer than a row";
    }
  }
  return {};
}

at::Tensor Float8Stack::weight_scale(std::span<const FrozenWeight> weights) {
  at::Tensor largest;
  if (const at::Tensor& packed = weights.front().quantized.packed; packed.is_meta()) {
    return at::empty({}, packed.options().dtype(at::kFloat));  // not every operator below has a Meta kernel
  }
  for (const FrozenWeight& weight : weights) {
    const QuantizedTensor& own = weight.quantized;
    at::Tensor absmax = own.absmax;
    if (own.double_quantized()) {
      absmax = ops::dequantize_blockwise(own.absmax, own.nested_absmax, own.nested_block_size).add_(own.nested_offset);
    }
    const at::Tensor most = absmax.abs().amax();
    largest = largest.defined() ? at::maximum(largest, most) : most;
  }
  // Weights that are all zero take any scale.
  return at::where(largest > 0, largest.div(ops::kLargestFloat8), at::ones_like(largest));
}

Float8Stack::Adapters Float8Stack::adapters_as(const at::TensorOptions& options) const {
  const ops::MemoryUseScope use(ops::MemoryUse::kDequantized);
  Adapters result{at::empty({rank_, in_}, options), at::empty({out_, rank_}, options)};
  std::vector<at::Tensor> a, b;
  std::vector<double> scaling;
  for (size_t i = 0; i < weights_.size(); ++i) {
    const auto& adapter = adapters_[i];
    const auto masters = options.dtype(at::kFloat);
    a.push_back(adapter ? adapter->a.detach() : at::empty({0, in_}, masters));
    b.push_back(adapter ? adapter->b.detach() : at::empty({weights_[i].out_features(), 0}, masters));
    scaling.push_back(adapter ? adapter->scaling : 1.0);
  }
  ops::lora_borders_(result.b, result.a, a, b, scaling);
  return result;
}

at::Tensor Float8Stack::weights_in_float8(bool transpose) const {
  const ops::MemoryUseScope use(ops::MemoryUse::kDequantized);
  std::vector<at::Tensor> packed, absmax, nested_absmax, nested_offset;
  std::vector<int64_t> rows;
  for (const FrozenWeight& weight : weights_) {
    const QuantizedTensor& own = weight.quantized;
    packed.push_back(own.packed);
    absmax.push_back(own.absmax);
    rows.push_back(own.shape[0]);
    if (!own.double_quantized()) continue;
    nested_absmax.push_back(own.nested_absmax);
    nested_offset.push_back(own.nested_offset);
  }
  const QuantizedTensor& kind = weights_.front().quantized;
  return ops::dequantize_4bit_float8(packed, absmax, nested_absmax, nested_offset, rows, in_, kind.block_size,
                                     kind.nested_block_size, kind.quant_type, scales_.weight, transpose);
}

at::Tensor Float8Stack::forward(at::Tensor& y, const at::Tensor& x) const {
  product(y, x, scales_, weights_in_float8(/*transpose=*/false));
  if (rank_ == 0) return {};
  const Adapters adapters = adapters_as(x.options());
  at::Tensor u = at::empty({x.size(0), rank_}, x.options());
  product_into(u, x, adapters.a.t());
  add_product(y, u, adapters.b.t());
  return u;
}

at::Tensor Float8Stack::input_product(const at::Tensor& x) const {
  at::Tensor u = at::empty({x.size(0), rank_}, x.options());
  product_into(u, x, adapters_as(x.options()).a.t());
  return u;
}

void Float8Stack::backward_input(at::Tensor* dx, const Wide& dy) const {
  if (dx != nullptr) product(*dx, dy.values(), scales_, weights_in_float8(/*transpose=*/true));
  if (rank_ == 0) return;
  const Adapters adapters = adapters_as(dy.buffer.options());
  at::Tensor v = dy.buffer.narrow(1, out_, rank_);
  product_into(v, dy.values(), adapters.b);
  if (dx != nullptr) add_product(*dx, v, adapters.a);
}

}  // namespace qlorapp
