// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/index_select.h>
#include <torch/library.h>

#include "../layer_shapes.hpp"

namespace qlorapp::ops {
namespace {

at::Tensor embedding(const at::Tensor& weight, const at::Tensor& tokens) {
  check_embedding("embedding", weight, tokens);
  return at::index_select(weight, 0, tokens);
}

}  // namespace

TORCH_LIBRARY_IMPL(qlorapp, CPU, m) { m.impl("embedding", embedding); }

}  // namespace qlorapp::ops
