// SPDX-License-Identifier: Apache-2.0
#include "adapters/lora_projection.hpp"

#include <ATen/ATen.h>

#include "adapters/dora.hpp"
#include "ops/dense_linear.hpp"
#include "ops/dropout.hpp"
#include "ops/memory_tape.hpp"
#include "products.hpp"
#include "quant/linear.hpp"

namespace qlorapp {
namespace {

bool drops(const LoraAdapter& adapter, const std::optional<DropoutKey>& dropout) {
  return dropout.has_value() && adapter.dropout > 0;
}

/// What A reads.
at::Tensor dropped(const at::Tensor& x, const LoraAdapter& adapter, const std::optional<DropoutKey>& dropout) {
  return drops(adapter, dropout) ? ops::seeded_dropout(x, adapter.dropout, *dropout) : x;
}

at::Tensor in_dtype(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.scalar_type() == dtype ? tensor.detach() : tensor.detach().to(dtype);
}

}  // namespace

void add_transposed_product(const at::Tensor& gradient, const at::Tensor& left, const at::Tensor& right, double scale) {
  at::Tensor target = gradient;
  if (target.scalar_type() == left.scalar_type()) {
    add_product(target, left.t(), right, scale);
  } else if (ops::computes_on_gpu(target) && target.scalar_type() == at::kFloat) {
    if (target.is_meta()) return;  // within the product itself: nothing is allocated, and Meta has no such product
    at::addmm_out(target, target, left.t(), right, at::kFloat, 1, scale);
  } else {
    target.add_(at::mm(left.t(), right), scale);
  }
}

Bytes FrozenWeight::nbytes() const {
  return quantized.defined() ? quantized.nbytes() : Bytes{static_cast<int64_t>(dense.nbytes())};
}

FrozenWeight FrozenWeight::to(at::Device device) const {
  return quantized.defined() ? FrozenWeight(quantized.to(device)) : FrozenWeight(dense.to(device));
}

void FrozenWeight::forward_out(at::Tensor& y, const at::Tensor& x, bool accumulate) const {
  if (quantized.defined()) {
    linear_4bit_out(y, x, quantized, /*transpose=*/false, accumulate);
  } else {
    ops::dense_linear_out(y, x, dense, accumulate);
  }
}

void FrozenWeight::backward_out(at::Tensor& dx, const at::Tensor& dy, bool accumulate) const {
  if (quantized.defined()) {
    linear_4bit_out(dx, dy, quantized, /*transpose=*/true, accumulate);
  } else if (accumulate) {
    add_product(dx, dy, dense);
  } else {
    product_into(dx, dy, dense);
  }
}

at::Tensor lora_input_product(const at::Tensor& x, const LoraAdapter& adapter, const std::optional<DropoutKey>& dropout) {
  return at::mm(dropped(x, adapter, dropout), in_dtype(adapter.a, x.scalar_type()).t());
}

at::Tensor lora_projection_forward(at::Tensor& y, const at::Tensor& x, const FrozenWeight& weight, const LoraAdapter* adapter,
                                   const std::optional<DropoutKey>& dropout, const at::Tensor& bias) {
  const bool scaled = adapter != nullptr && adapter->magnitude.defined();
  const bool begins_as_bias = bias.defined() && !scaled;
  if (begins_as_bias && !y.is_meta()) y.copy_(bias.expand_as(y));
  weight.forward_out(y, x, begins_as_bias);
  if (adapter == nullptr) return {};
  const at::Tensor b = in_dtype(adapter->b, x.scalar_type());
  if (!scaled) {
    at::Tensor u = lora_input_product(x, *adapter, dropout);
    add_product(y, u, b.t(), adapter->scaling);
    return u;
  }
  const at::Tensor scale = dora_scale(weight, *adapter).scale;
  const at::Tensor input = dropped(x, *adapter, dropout);
  at::Tensor u = at::mm(input, in_dtype(adapter->a, x.scalar_type()).t());
  if (!drops(*adapter, dropout)) {
    add_product(y, u, b.t(), adapter->scaling);
    y.mul_(scale);
    if (bias.defined()) y.add_(bias);
    return u;
  }
  at::Tensor base = at::empty({x.size(0), weight.out_features()}, x.options());
  weight.forward_out(base, input);
  y.add_(base * (scale - 1)).add_(at::mm(u, b.t()) * (scale * adapter->scaling));
  if (bias.defined()) y.add_(bias);
  return u;
}

at::Tensor lora_projection_backward_input(at::Tensor* dx, bool accumulate_dx, const at::Tensor& dy_in, const FrozenWeight& weight,
                                          const LoraAdapter* adapter, const std::optional<DropoutKey>& dropout) {
  const bool scaled = adapter != nullptr && adapter->magnitude.defined(), drop = adapter != nullptr && drops(*adapter, dropout);
  at::Tensor dy = dy_in, of_base;  // gradients of the low-rank product and, with dropout, of the base's second product
  if (scaled) {
    const at::Tensor scale = dora_scale(weight, *adapter).scale;
    dy = (dy_in * scale).to(dy_in.scalar_type());
    if (drop) of_base = (dy_in * (scale - 1)).to(dy_in.scalar_type());
  }
  if (dx != nullptr) weight.backward_out(*dx, scaled && drop ? dy_in : dy, accumulate_dx);
  if (adapter == nullptr) return {};
  at::Tensor v = at::mm(dy, in_dtype(adapter->b, dy.scalar_type()));
  if (adapter->scaling != 1.0) v.mul_(adapter->scaling);
  if (dx != nullptr) {
    const at::Tensor a = in_dtype(adapter->a, dy.scalar_type());
    if (drop) {
      at::Tensor of_input = at::mm(v, a);
      if (scaled) weight.backward_out(of_input, of_base, /*accumulate=*/true);
      dx->add_(ops::seeded_dropout(of_input, adapter->dropout, *dropout));
    } else {
      add_product(*dx, v, a);
    }
  }
  return v;
}

void lora_projection_backward_adapter(const at::Tensor& dy_in, const at::Tensor& x, const at::Tensor& u, const at::Tensor& v,
                                      const FrozenWeight& weight, const LoraAdapter& adapter,
                                      const std::optional<DropoutKey>& dropout, const LoraGradients& gradients) {
  const at::Tensor input = dropped(x, adapter, dropout);
  at::Tensor dy = dy_in;
  if (adapter.magnitude.defined()) {
    const DoraScale dora = dora_scale(weight, adapter);
    at::Tensor z = at::empty({x.size(0), weight.out_features()}, x.options());
    weight.forward_out(z, input);
    add_product(z, u, in_dtype(adapter.b, x.scalar_type()).t(), adapter.scaling);
    gradients.magnitude.add_((dy_in.to(gradients.magnitude.scalar_type()) * z).sum(0) / dora.norm);
    dy = (dy_in * dora.scale).to(dy_in.scalar_type());
  }
  add_transposed_product(gradients.b, dy, u, adapter.scaling);
  add_transposed_product(gradients.a, v, input, 1.0);
}

}  // namespace qlorapp
