// SPDX-License-Identifier: Apache-2.0
#include "nn/block/projection_group.hpp"

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>

#include "../../adapters/products.hpp"
#include "adapters/lora_projection.hpp"
#include "nn/decode_adapters.hpp"
#include "nn/input_squares.hpp"
#include "nn/views.hpp"
#include "ops/linear.hpp"

namespace qlorapp {
ProjectionGroup::ProjectionGroup(const BlockData& data, format::Group group) : data_(data), group_(group) {
  const std::vector<format::Group>& all = data.shape.linears;
  begin_ = static_cast<size_t>(std::find(all.begin(), all.end(), group) - all.begin());
  count_ = static_cast<size_t>(std::count(all.begin(), all.end(), group));
}

std::span<const FrozenWeight> ProjectionGroup::weights(const StepContext& context) const {
  return std::span(data_.projections(context)).subspan(begin_, count_);
}

std::span<const std::optional<LoraAdapter>> ProjectionGroup::adapters() const {
  return std::span(data_.adapters).subspan(begin_, count_);
}

const LoraAdapter* ProjectionGroup::adapter(size_t i) const {
  const auto& found = data_.adapters[begin_ + i];
  return found ? &*found : nullptr;
}

bool ProjectionGroup::has_adapter() const {
  return std::any_of(adapters().begin(), adapters().end(), [](const auto& adapter) { return adapter.has_value(); });
}

bool ProjectionGroup::has_inputs(std::span<const at::Tensor> u) const {
  for (size_t i = 0; i < count_; ++i) {
    if (adapter(i) != nullptr && !u[i].defined()) return false;
  }
  return true;
}

std::optional<DropoutKey> ProjectionGroup::dropout(size_t i, const StepContext& context) const {
  if (!context.training) return std::nullopt;
  const auto slot = static_cast<int64_t>(begin_ + i);
  return context.dropout_key(static_cast<uint32_t>(data_.index * 16 + slot), data_.weights.projections[begin_ + i].in_features());
}

ProjectionStack ProjectionGroup::stack(const StepContext& context) const { return {weights(context), adapters()}; }

Float8Stack ProjectionGroup::float8_stack(const StepContext& context) const {
  return {weights(context), adapters(), data_.float8[static_cast<size_t>(group_)]};
}

int64_t ProjectionGroup::spare(const StepContext& context) const { return data_.stacked(context) ? stack(context).spare() : 0; }

at::Tensor ProjectionGroup::workspace(const StepContext& context, at::ScalarType dtype) const {
  return data_.stacked(context) && !context.float8 ? stack(context).workspace(dtype) : at::Tensor();
}

void ProjectionGroup::project(at::Tensor y, const Wide& x, const StepContext& context, std::span<at::Tensor> u,
                              at::Tensor* workspace) const {
  if (context.squares) context.squares->add(data_.index, begin_, x.values());
  int64_t column = 0;
  if (data_.stacked(context)) {
    at::Tensor products;
    if (context.float8) {
      products = float8_stack(context).forward(y, x.values());
      if (bias().defined()) y.add_(bias());
    } else {
      const ProjectionStack all = stack(context);
      const at::Tensor dense = workspace != nullptr && workspace->defined() ? *workspace : all.workspace(y.scalar_type());
      products = all.forward(y, x, dense, bias());
      if (products.defined() && !u.empty() && x.spare() > 0) {
        products = columns(products, 0, all.rank()).contiguous();  // out of the columns behind x, which is not kept
      }
      if (workspace != nullptr) *workspace = dense;
    }
    for (size_t i = 0; products.defined() && i < u.size(); ++i) {
      if (adapter(i) == nullptr) continue;
      u[i] = columns(products, column, adapter(i)->a.size(0));
      column += adapter(i)->a.size(0);
    }
    return;
  }
  const at::Tensor values = x.values();
  if (context.few && u.empty()) return project_few(y, values, context);
  const std::span<const FrozenWeight> all = weights(context);
  for (size_t i = 0; i < count_; ++i) {
    at::Tensor part = columns(y, column, all[i].out_features());
    const at::Tensor own = bias().defined() ? bias().narrow(0, column, part.size(1)) : at::Tensor();
    at::Tensor product = lora_projection_forward(part, values, all[i], adapter(i), dropout(i, context), own);
    if (!u.empty()) u[i] = std::move(product);
    column += part.size(1);
  }
}

void ProjectionGroup::project_few(at::Tensor y, const at::Tensor& x, const StepContext& context) const {
  const std::span<const FrozenWeight> all = weights(context);
  const DecodeAdapters::OfBlock none(count_);
  const auto adapters =
      context.adapters ? std::span(context.adapters->block(data_.index)).subspan(begin_, count_) : std::span(none);
  const auto [rank, together, scaled, a] = JoinedInputs::of(adapters);  // of matrices apart each is multiplied on its own
  if (together && !scaled && multiply_group(y, x, all, adapters, a)) return;
  at::Tensor u;
  if (a.defined()) u = at::mm(x, transposed(a));
  int64_t column = 0, inner = 0;
  for (size_t i = 0; i < count_; ++i) {
    at::Tensor part = columns(y, column, all[i].out_features());
    const at::Tensor own = bias().defined() ? bias().narrow(0, column, part.size(1)) : at::Tensor();
    const auto& adapter = adapters[i];
    const bool begins_as_bias = own.defined() && !(adapter && adapter->scale.defined());
    if (begins_as_bias) part.copy_(own.expand_as(part));
    all[i].forward_out(part, x, begins_as_bias);
    if (adapter) {
      const int64_t r = adapter->a.size(0);
      const at::Tensor of_layer = together ? columns(u, inner, r) : at::mm(x, transposed(adapter->a));
      add_product(part, of_layer, transposed(adapter->b), adapter->scaling);
      inner += r;
      if (adapter->scale.defined()) {
        part.mul_(adapter->scale);
        if (own.defined()) part.add_(own);
      }
    }
    column += part.size(1);
  }
}

/// @returns false where there is no such launch.
bool ProjectionGroup::multiply_group(at::Tensor& y, const at::Tensor& x, std::span<const FrozenWeight> all,
                                     std::span<const std::optional<DecodeAdapter>> adapters, const at::Tensor& a) const {
  const QuantizedTensor& kind = all.front().quantized;
  if (!kind.defined() || !has_code_book(kind.quant_type) || count_ > 4 || x.stride(0) % 8 != 0) return false;
  if (!ops::has_linear_4bit_group(x.device(), x.scalar_type(), x.size(0), x.size(1), kind.block_size, kind.nested_block_size))
    return false;
  std::vector<at::Tensor> packed, absmax, nested_absmax, nested_offset, b;
  std::vector<int64_t> heights;
  std::vector<double> scaling;
  for (size_t i = 0; i < count_; ++i) {
    const QuantizedTensor& weight = all[i].quantized;
    if (!weight.defined() || weight.quant_type != kind.quant_type || weight.block_size != kind.block_size ||
        weight.nested_block_size != kind.nested_block_size || weight.double_quantized() != kind.double_quantized())
      return false;
    packed.push_back(weight.packed);
    absmax.push_back(weight.absmax);
    if (weight.double_quantized()) {
      nested_absmax.push_back(weight.nested_absmax);
      nested_offset.push_back(weight.nested_offset);
    }
    heights.push_back(weight.shape[0]);
    b.push_back(adapters[i] ? adapters[i]->b : at::empty({weight.shape[0], 0}, x.options()));
    scaling.push_back(adapters[i] ? adapters[i]->scaling : 1.0);
  }
  ops::linear_4bit_group_(y, x, packed, absmax, nested_absmax, nested_offset, heights, kind.block_size, kind.nested_block_size,
                          kind.quant_type, bias().defined() ? std::optional(bias()) : std::nullopt,
                          a.defined() ? std::optional(a) : std::nullopt, b, scaling);
  return true;
}

void ProjectionGroup::form_inputs(const at::Tensor& x, const StepContext& context, std::span<at::Tensor> u,
                                  const at::Tensor& workspace) const {
  if (data_.stacked(context)) {
    const at::Tensor all = context.float8 ? float8_stack(context).input_product(x) : stack(context).input_product(x, workspace);
    int64_t column = 0;
    for (size_t i = 0; i < count_; ++i) {
      if (adapter(i) == nullptr) continue;
      u[i] = columns(all, column, adapter(i)->a.size(0));
      column += adapter(i)->a.size(0);
    }
    return;
  }
  for (size_t i = 0; i < count_; ++i) {
    if (adapter(i) != nullptr) u[i] = lora_input_product(x, *adapter(i), dropout(i, context));
  }
}

ProjectionGroup::Inner ProjectionGroup::project_back(at::Tensor* dx, const Wide& dy, const StepContext& context,
                                                     const at::Tensor& workspace) const {
  Inner v(count_);
  if (data_.stacked(context) && context.float8) {
    float8_stack(context).backward_input(dx, dy);
    return v;
  }
  if (data_.stacked(context)) {
    const ProjectionStack all = stack(context);
    all.backward_input(dx, dy, workspace.defined() ? workspace : all.workspace(dy.buffer.scalar_type()));
    return v;
  }
  int64_t column = 0;
  const std::span<const FrozenWeight> all = weights(context);
  for (size_t i = 0; i < count_; ++i) {
    const at::Tensor part = columns(dy.buffer, column, all[i].out_features());
    v[i] = lora_projection_backward_input(dx, /*accumulate=*/column > 0, part, all[i], adapter(i), dropout(i, context));
    column += part.size(1);
  }
  return v;
}

void ProjectionGroup::add_gradients(const Wide& dy, const at::Tensor& x, const Inner& v, const StepContext& context,
                                    std::span<const at::Tensor> u, std::span<const LoraGradients> gradients) const {
  if (data_.stacked(context)) {
    stack(context).backward_adapters(dy, x, u, gradients.subspan(begin_, count_));
    return;
  }
  int64_t column = 0;
  const std::span<const FrozenWeight> all = weights(context);
  for (size_t i = 0; i < count_; ++i) {
    const at::Tensor part = columns(dy.buffer, column, all[i].out_features());
    if (const LoraAdapter* const own = adapter(i)) {
      lora_projection_backward_adapter(part, x, u[i], v[i], all[i], *own, dropout(i, context), gradients[begin_ + i]);
    }
    column += part.size(1);
  }
}

}  // namespace qlorapp
