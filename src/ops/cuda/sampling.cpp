// SPDX-License-Identifier: Apache-2.0
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "cuda/sampling.hpp"
#include "launch.hpp"
#include "ops/layer_shapes.hpp"

namespace qlorapp::ops {
namespace {

void keep_likely_tokens_(at::Tensor& scores, int64_t top_k, double top_p, double min_p) {
  check_likely("keep_likely_tokens_", scores, top_k, top_p, min_p);
  const gpu::Launch launch(scores);
  C10_CUDA_CHECK(cuda::keep_likely_tokens(scores.mutable_data_ptr<float>(), scores.size(0), scores.size(1), top_k, top_p, min_p,
                                          launch.stream()));
}

at::Tensor draw_tokens(const at::Tensor& scores, const at::Tensor& draws) {
  check_draws("draw_tokens", scores, draws);
  gpu::check_device("draw_tokens", "draws", draws, scores);
  const gpu::Launch launch(scores);
  at::Tensor tokens = at::empty({scores.size(0)}, scores.options().dtype(at::kLong));
  C10_CUDA_CHECK(cuda::draw_tokens(scores.const_data_ptr<float>(), scores.size(0), scores.size(1), draws.const_data_ptr<double>(),
                                   tokens.mutable_data_ptr<int64_t>(), launch.stream()));
  return tokens;
}

}  // namespace

TORCH_LIBRARY_IMPL(qlorapp, CUDA, m) {
  m.impl("keep_likely_tokens_", keep_likely_tokens_);
  m.impl("draw_tokens", draw_tokens);
}

}  // namespace qlorapp::ops
