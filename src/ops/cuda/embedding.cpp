// SPDX-License-Identifier: Apache-2.0
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "../layer_shapes.hpp"
#include "../row_views.hpp"
#include "cuda/rows.hpp"
#include "launch.hpp"

namespace qlorapp::ops {
namespace {

at::Tensor embedding(const at::Tensor& weight, const at::Tensor& tokens) {
  check_embedding("embedding", weight, tokens);
  const cuda::Float type = gpu::float_type("embedding", weight);
  const gpu::Launch launch(tokens);
  // A table in pinned host memory is read where it is: under unified addressing its address is the GPU's, too.
  at::Tensor out = at::empty({tokens.size(0), weight.size(1)}, weight.options().device(tokens.device()));
  if (out.numel() == 0) return out;
  const at::Tensor table = as_rows(weight), index = tokens.contiguous();
  C10_CUDA_CHECK(cuda::gather_rows(type, table.const_data_ptr(), table.stride(0), table.size(0), index.const_data_ptr<int64_t>(),
                                   out.mutable_data_ptr(), out.stride(0), out.size(0), out.size(1), launch.stream()));
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(qlorapp, CUDA, m) { m.impl("embedding", embedding); }

}  // namespace qlorapp::ops
