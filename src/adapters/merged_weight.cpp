// SPDX-License-Identifier: Apache-2.0
#include "adapters/merged_weight.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <utility>

#include "ops/memory_tape.hpp"
#include "products.hpp"

namespace qlorapp {

at::Tensor merged_weight(FrozenWeight weight, const LoraAdapter* adapter, const Quantizer* quantizer, at::ScalarType dtype) {
  const at::NoGradGuard no_grad;
  at::Tensor sum;
  {
    const ops::MemoryUseScope use(ops::MemoryUse::kDequantized);
    if (quantizer != nullptr && !weight.quantized.defined()) {
      weight = FrozenWeight(quantizer->quantize(std::exchange(weight.dense, {})));
    }
    sum = weight.quantized.defined() ? Quantizer().dequantize(weight.quantized, at::kFloat) : weight.dense.to(at::kFloat);
    weight = {};
  }
  if (adapter != nullptr) {
    add_product(sum, adapter->b.detach(), adapter->a.detach(), adapter->scaling);
    // Without a tensor of the weight's size; on Meta torch's Python package would make one (products.hpp).
    if (adapter->magnitude.defined() && !sum.is_meta()) {
      const at::Tensor scale = adapter->magnitude.detach() / at::linalg_vector_norm(sum, 2, at::IntArrayRef{1});
      sum.mul_(scale.unsqueeze(1));
    }
  }
  const ops::MemoryUseScope use(ops::MemoryUse::kLoading);
  return sum.to(dtype);
}

}  // namespace qlorapp
