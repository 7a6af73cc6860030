// SPDX-License-Identifier: Apache-2.0
#include "nn/projection_stack.hpp"

#include <vector>

#include <ATen/ATen.h>

#include "../adapters/products.hpp"
#include "adapters/lora_projection.hpp"
#include "ops/lora_augment.hpp"
#include "ops/memory_tape.hpp"
#include "ops/quantize.hpp"

namespace qlorapp {
namespace {

/// The weights that can be dequantized by one call: four-bit, all of one kind.
bool alike(const FrozenWeight& a, const FrozenWeight& b) {
  return a.quantized.defined() && b.quantized.defined() && a.quantized.quant_type == b.quantized.quant_type &&
         a.quantized.block_size == b.quantized.block_size && a.quantized.nested_block_size == b.quantized.nested_block_size &&
         a.quantized.double_quantized() == b.quantized.double_quantized();
}

/// Whether contiguous `next` begins in memory where contiguous `before` ends: slices of one arena.
bool follows(const at::Tensor& next, const at::Tensor& before) {
  return next.is_alias_of(before) && next.is_contiguous() && before.is_contiguous() &&
         next.storage_offset() == before.storage_offset() + before.numel();
}

}  // namespace

ProjectionStack::ProjectionStack(std::span<const FrozenWeight> weights, std::span<const std::optional<LoraAdapter>> adapters)
    : weights_(weights), adapters_(adapters), in_(weights.front().in_features()) {
  for (const FrozenWeight& weight : weights_) out_ += weight.out_features();
  for (const auto& adapter : adapters_) rank_ += adapter ? adapter->a.size(0) : 0;
  spare_ = padded(rank_);
}

at::Tensor ProjectionStack::workspace(at::ScalarType dtype) const {
  const FrozenWeight& first = weights_.front();
  const at::Device device = first.quantized.defined() ? first.quantized.packed.device() : first.dense.device();
  const auto empty = [&] {
    const ops::MemoryUseScope use(ops::MemoryUse::kDequantized);
    return at::empty({out_ + spare_, in_ + spare_}, at::TensorOptions().dtype(dtype).device(device));
  };
  at::Tensor buffer = empty();
  std::vector<at::Tensor> a, b;
  std::vector<double> scaling;
  for (size_t i = 0; i < weights_.size() && spare_ > 0; ++i) {
    const auto& adapter = adapters_[i];
    const auto options = at::TensorOptions().dtype(at::kFloat).device(device);
    a.push_back(adapter ? adapter->a.detach() : at::empty({0, in_}, options));
    b.push_back(adapter ? adapter->b.detach() : at::empty({weights_[i].out_features(), 0}, options));
    scaling.push_back(adapter ? adapter->scaling : 1.0);
  }
  int64_t row = 0;
  for (size_t i = 0; i < weights_.size();) {
    size_t end = i + 1;
    int64_t rows = weights_[i].out_features();
    for (; end < weights_.size() && alike(weights_[i], weights_[end]); ++end) rows += weights_[end].out_features();
    at::Tensor target = columns(qlorapp::rows(buffer, row, rows), 0, in_);
    if (weights_[i].quantized.defined()) {
      std::vector<at::Tensor> packed, absmax, nested_absmax, nested_offset;
      std::vector<int64_t> heights;
      for (size_t j = i; j < end; ++j) {
        const QuantizedTensor& weight = weights_[j].quantized;
        packed.push_back(weight.packed);
        absmax.push_back(weight.absmax);
        heights.push_back(weight.shape[0]);
        if (!weight.double_quantized()) continue;
        nested_absmax.push_back(weight.nested_absmax);
        nested_offset.push_back(weight.nested_offset);
      }
      const QuantizedTensor& kind = weights_[i].quantized;
      if (spare_ > 0 && heights.size() == weights_.size()) {  // all of one kind: one call
        ops::dequantize_4bit_augmented_(buffer, packed, absmax, nested_absmax, nested_offset, heights, kind.block_size,
                                        kind.nested_block_size, kind.quant_type, a, b, scaling);
        return buffer;
      }
      ops::dequantize_4bit_stack_(target, packed, absmax, nested_absmax, nested_offset, heights, kind.block_size,
                                  kind.nested_block_size, kind.quant_type);
    } else {
      target.copy_(weights_[i].dense);
    }
    row += rows;
    i = end;
  }
  if (spare_ > 0) ops::lora_augment_(buffer, a, b, scaling);
  return buffer;
}

at::Tensor ProjectionStack::forward(at::Tensor& y, const Wide& x, const at::Tensor& workspace, const at::Tensor& bias) const {
  const at::Tensor values = x.values();
  if (spare_ == 0) {
    product_into(y, values, transposed(workspace), bias);
    return {};
  }
  const at::Tensor a = columns(rows(workspace, out_, spare_), 0, in_), own = rows(workspace, 0, out_);
  if (x.spare() >= spare_) {
    at::Tensor u = columns(x.buffer, in_, spare_);
    product_into(u, values, transposed(a));
    product_into(y, columns(x.buffer, 0, in_ + spare_), transposed(own), bias);
    return u;
  }
  const at::Tensor u = at::mm(values, transposed(a));
  product_into(y, values, transposed(columns(own, 0, in_)), bias);
  add_product(y, u, transposed(columns(own, in_, spare_)));
  return u;
}

at::Tensor ProjectionStack::input_product(const at::Tensor& x, const at::Tensor& workspace) const {
  return columns(at::mm(x, transposed(columns(rows(workspace, out_, spare_), 0, in_))), 0, rank_);
}

void ProjectionStack::backward_input(at::Tensor* dx, const Wide& dy, const at::Tensor& workspace) const {
  if (spare_ > 0) {
    at::Tensor v = columns(dy.buffer, out_, spare_);
    product_into(v, dy.values(), columns(rows(workspace, 0, out_), in_, spare_));
  }
  if (dx != nullptr) product_into(*dx, columns(dy.buffer, 0, out_ + spare_), columns(workspace, 0, in_));
}

void ProjectionStack::backward_adapters(const Wide& dy, const at::Tensor& x, std::span<const at::Tensor> u,
                                        std::span<const LoraGradients> gradients) const {
  int64_t column = 0, rank = 0;
  at::Tensor together;  // gradients of A that follow each other in memory, as one
  int64_t first = 0;    // of its ranks
  const auto add_together = [&] {
    if (together.defined()) add_transposed_product(together, columns(dy.buffer, out_ + first, together.size(0)), x, 1.0);
  };
  for (size_t i = 0; i < weights_.size(); ++i) {
    const int64_t width = weights_[i].out_features();
    if (const auto& adapter = adapters_[i]) {
      const at::Tensor& a = gradients[i].a;
      const int64_t r = a.size(0);
      add_transposed_product(gradients[i].b, columns(dy.buffer, column, width), u[i], adapter->scaling);
      if (together.defined() && follows(a, together)) {
        together = together.as_strided({together.size(0) + r, in_}, {in_, 1});
      } else {
        add_together();
        together = a;
        first = rank;
      }
      rank += r;
    }
    column += width;
  }
  add_together();
}

}  // namespace qlorapp
