// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/adapters/merged_weight.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <utility>

#include "products.hpp"
#include "qlorapp/core/check.hpp"
#include "qlorapp/ops/memory_tape.hpp"

namespace qlorapp {

std::string_view to_string(MergeBase base) { return base == MergeBase::kOriginal ? "original" : "dequantized"; }

MergeBase parse_merge_base(std::string_view text) {
  for (const MergeBase base : {MergeBase::kOriginal, MergeBase::kDequantized}) {
    if (text == to_string(base)) return base;
  }
  throw ValueError(concat("[merge] base must be original or dequantized; got '", text, "'."));
}

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
