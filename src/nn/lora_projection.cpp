// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/nn/lora_projection.hpp"

#include <ATen/ATen.h>

#include "qlorapp/ops/dropout.hpp"
#include "qlorapp/quant/linear.hpp"

namespace qlorapp {
namespace {

bool drops(const LoraAdapter& adapter, const std::optional<DropoutKey>& dropout) {
  return dropout.has_value() && adapter.dropout > 0;
}

at::Tensor in_dtype(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.scalar_type() == dtype ? tensor.detach() : tensor.detach().to(dtype);
}

}  // namespace

void add_transposed_product(const at::Tensor& gradient, const at::Tensor& left, const at::Tensor& right, double scale) {
  at::Tensor target = gradient;
  if (target.scalar_type() == left.scalar_type()) {
    at::addmm_out(target, target, left.t(), right, 1, scale);
  } else if (target.is_meta()) {
    return;  // as on a GPU: nothing beside the gradient
  } else if (target.is_cuda() && target.scalar_type() == at::kFloat) {
    at::addmm_out(target, target, left.t(), right, at::kFloat, 1, scale);
  } else {
    target.add_(at::mm(left.t(), right), scale);
  }
}

Bytes FrozenWeight::nbytes() const {
  return quantized.defined() ? quantized.nbytes() : Bytes{static_cast<int64_t>(dense.nbytes())};
}

void FrozenWeight::forward_out(at::Tensor& y, const at::Tensor& x) const {
  if (quantized.defined()) {
    linear_4bit_out(y, x, quantized, /*transpose=*/false, /*accumulate=*/false);
  } else {
    at::mm_out(y, x, dense.t());
  }
}

void FrozenWeight::backward_out(at::Tensor& dx, const at::Tensor& dy, bool accumulate) const {
  if (quantized.defined()) {
    linear_4bit_out(dx, dy, quantized, /*transpose=*/true, accumulate);
  } else if (accumulate) {
    at::addmm_out(dx, dx, dy, dense);
  } else {
    at::mm_out(dx, dy, dense);
  }
}

at::Tensor lora_input_product(const at::Tensor& x, const LoraAdapter& adapter, const std::optional<DropoutKey>& dropout) {
  const at::Tensor a = in_dtype(adapter.a, x.scalar_type());
  return at::mm(drops(adapter, dropout) ? ops::seeded_dropout(x, adapter.dropout, *dropout) : x, a.t());
}

at::Tensor lora_projection_forward(at::Tensor& y, const at::Tensor& x, const FrozenWeight& weight, const LoraAdapter* adapter,
                                   const std::optional<DropoutKey>& dropout) {
  weight.forward_out(y, x);
  if (adapter == nullptr) return {};
  const at::Tensor b = in_dtype(adapter->b, x.scalar_type());
  at::Tensor u = lora_input_product(x, *adapter, dropout);
  at::addmm_out(y, y, u, b.t(), 1, adapter->scaling);
  return u;
}

at::Tensor lora_projection_backward_input(at::Tensor* dx, bool accumulate_dx, const at::Tensor& dy, const FrozenWeight& weight,
                                          const LoraAdapter* adapter, const std::optional<DropoutKey>& dropout) {
  if (dx != nullptr) weight.backward_out(*dx, dy, accumulate_dx);
  if (adapter == nullptr) return {};
  at::Tensor v = at::mm(dy, in_dtype(adapter->b, dy.scalar_type()));
  if (adapter->scaling != 1.0) v.mul_(adapter->scaling);
  if (dx != nullptr) {
    const at::Tensor a = in_dtype(adapter->a, dy.scalar_type());
    if (drops(*adapter, dropout)) {
      dx->add_(ops::seeded_dropout(at::mm(v, a), adapter->dropout, *dropout));
    } else {
      at::addmm_out(*dx, *dx, v, a);
    }
  }
  return v;
}

void lora_projection_backward_adapter(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& u, const at::Tensor& v,
                                      const LoraAdapter& adapter, const std::optional<DropoutKey>& dropout,
                                      const LoraGradients& gradients) {
  add_transposed_product(gradients.b, dy, u, adapter.scaling);
  add_transposed_product(gradients.a, v, drops(adapter, dropout) ? ops::seeded_dropout(x, adapter.dropout, *dropout) : x, 1.0);
}

}  // namespace qlorapp
