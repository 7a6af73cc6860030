// SPDX-License-Identifier: Apache-2.0
#include "adapters/dora.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "qlorapp/quant/quantizer.hpp"

namespace qlorapp {

at::Tensor squared_row_norms(const FrozenWeight& weight) {
  const at::NoGradGuard no_grad;
  const at::Tensor dense =
      weight.quantized.defined() ? Quantizer().dequantize(weight.quantized, at::kFloat) : weight.dense.detach().to(at::kFloat);
  return dense.square().sum(1);
}

at::Tensor dora_norm(const FrozenWeight& weight, const LoraAdapter& adapter) {
  const at::NoGradGuard no_grad;
  const at::Tensor a = adapter.a.detach(), b = adapter.b.detach();
  const at::ScalarType dtype = weight.quantized.defined() ? at::kFloat : weight.dense.scalar_type();
  at::Tensor product = at::empty({a.size(0), weight.out_features()}, a.options().dtype(dtype));  // A·Wᵀ
  weight.forward_out(product, a.to(dtype));
  const at::Tensor cross = (product.to(at::kFloat).t() * b).sum(1);
  const at::Tensor own = (at::mm(b, at::mm(a, a.t())) * b).sum(1);
  // Rounding must not make a norm that is nearly nothing negative.
  return (adapter.weight_norm_squared + cross * (2 * adapter.scaling) + own * (adapter.scaling * adapter.scaling))
      .clamp_min(0)
      .sqrt();
}

DoraScale dora_scale(const FrozenWeight& weight, const LoraAdapter& adapter) {
  at::Tensor norm = dora_norm(weight, adapter);
  at::Tensor scale = adapter.magnitude.detach() / norm;
  return {std::move(norm), std::move(scale)};
}

}  // namespace qlorapp
