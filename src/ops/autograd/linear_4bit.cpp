// SPDX-License-Identifier: Apache-2.0
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "../quantize_arguments.hpp"
#include "ops/linear.hpp"
#include "ops/no_autocast.hpp"
#include "ops/operator.hpp"

namespace qlorapp::ops {
namespace {

using OptionalTensor = std::optional<at::Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Saves the four packed tensors and the shape. dx is the same operator with `transpose` turned, called with gradients recorded
/// when they are wanted, so second derivatives work.
struct Linear4bit : torch::autograd::Function<Linear4bit> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& packed, const at::Tensor& absmax,
                            const OptionalTensor& nested_absmax, const OptionalTensor& nested_offset,
                            const std::vector<int64_t>& shape, int64_t block_size, int64_t nested_block_size,
                            const std::string& quant_type, bool transpose) {
    const QuantType type = checked_quant_type("linear_4bit", quant_type);
    context->save_for_backward({packed, absmax, nested_absmax.value_or(at::Tensor()), nested_offset.value_or(at::Tensor())});
    context->saved_data["shape"] = shape;
    context->saved_data["block_size"] = block_size;
    context->saved_data["nested_block_size"] = nested_block_size;
    context->saved_data["quant_type"] = static_cast<int64_t>(type);
    context->saved_data["transpose"] = transpose;
    const BelowAutograd below;
    return linear_4bit(x, packed, absmax, nested_absmax, nested_offset, shape, block_size, nested_block_size, type, transpose);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const NoAutocast no_autocast;
    variable_list result(10);
    if (!gradients[0].defined()) return result;
    const auto saved = context->get_saved_variables();
    const auto optional = [](const at::Tensor& tensor) { return tensor.defined() ? OptionalTensor(tensor) : std::nullopt; };
    auto& data = context->saved_data;
    result[0] = linear_4bit(gradients[0], saved[0], saved[1], optional(saved[2]), optional(saved[3]), data["shape"].toIntVector(),
                            data["block_size"].toInt(), data["nested_block_size"].toInt(),
                            static_cast<QuantType>(data["quant_type"].toInt()), !data["transpose"].toBool());
    return result;
  }
};

at::Tensor linear_4bit_autograd(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& absmax,
                                const OptionalTensor& nested_absmax, const OptionalTensor& nested_offset, at::IntArrayRef shape,
                                int64_t block_size, int64_t nested_block_size, std::string_view quant_type, bool transpose) {
  return Linear4bit::apply(x, packed, absmax, nested_absmax, nested_offset, shape.vec(), block_size, nested_block_size,
                           std::string(quant_type), transpose);
}

/// Rounding to codes has no derivative; a silent zero would be worse than an error.
void refuse_gradient(const char* op, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(!(at::GradMode::is_enabled() && tensor.requires_grad()), "[", op, "] ", name,
                    " must not require a gradient, because codes have none; got one that does. Pass ", name, ".detach().");
}

using Pair = std::tuple<at::Tensor, at::Tensor>;
template <class... Arguments>
auto below_autograd(const char* name, Arguments... arguments) {
  const BelowAutograd below;
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Pair(Arguments...)>().call(arguments...);
}

Pair quantize_4bit(const at::Tensor& weight, int64_t block_size, std::string_view quant_type) {
  refuse_gradient("quantize_4bit", "weight", weight);
  return below_autograd<const at::Tensor&, int64_t, std::string_view>("qlorapp::quantize_4bit", weight, block_size, quant_type);
}
Pair quantize_4bit_bnb(const at::Tensor& weight, int64_t block_size, std::string_view quant_type) {
  refuse_gradient("quantize_4bit_bnb", "weight", weight);
  return below_autograd<const at::Tensor&, int64_t, std::string_view>("qlorapp::quantize_4bit_bnb", weight, block_size, quant_type);
}
Pair quantize_blockwise(const at::Tensor& x, int64_t block_size, bool is_signed) {
  refuse_gradient("quantize_blockwise", "x", x);
  return below_autograd<const at::Tensor&, int64_t, bool>("qlorapp::quantize_blockwise", x, block_size, is_signed);
}
Pair quantize_blockwise_bnb(const at::Tensor& x, int64_t block_size, bool is_signed) {
  refuse_gradient("quantize_blockwise_bnb", "x", x);
  return below_autograd<const at::Tensor&, int64_t, bool>("qlorapp::quantize_blockwise_bnb", x, block_size, is_signed);
}

void linear_4bit_out_autograd(at::Tensor& y, const at::Tensor& x, const at::Tensor& packed, const at::Tensor& absmax,
                              const OptionalTensor& nested_absmax, const OptionalTensor& nested_offset, at::IntArrayRef shape,
                              int64_t block_size, int64_t nested_block_size, std::string_view quant_type, bool transpose,
                              bool accumulate) {
  refuse_gradient("linear_4bit_out", "x", x);
  refuse_gradient("linear_4bit_out", "y", y);
  const at::AutoDispatchBelowAutograd below;  // y was written: its version is counted next
  const InsideKernel inside;
  linear_4bit_out(y, x, packed, absmax, nested_absmax, nested_offset, shape, block_size, nested_block_size,
                  checked_quant_type("linear_4bit_out", quant_type), transpose, accumulate);
}

}  // namespace

TORCH_LIBRARY_IMPL(qlorapp, Autograd, m) {
  m.impl("linear_4bit", linear_4bit_autograd);
  m.impl("linear_4bit_out", linear_4bit_out_autograd);
  m.impl("quantize_4bit", quantize_4bit);
  m.impl("quantize_4bit_bnb", quantize_4bit_bnb);
  m.impl("quantize_blockwise", quantize_blockwise);
  m.impl("quantize_blockwise_bnb", quantize_blockwise_bnb);
}

}  // namespace qlorapp::ops
