// SPDX-License-Identifier: Apache-2.0
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "core/philox.hpp"
#include "cuda/dropout.hpp"
#include "launch.hpp"

namespace qlorapp::ops {
namespace {

at::Tensor seeded_dropout(const at::Tensor& x, double p, int64_t seed, int64_t micro_step, int64_t site, int64_t first) {
  TORCH_CHECK_VALUE(p >= 0.0 && p < 1.0, "[seeded_dropout] p must be in [0, 1); got ", p, ".");
  TORCH_CHECK_VALUE(first >= 0 && first % 4 == 0, "[seeded_dropout] first must be a multiple of 4; got ", first,
                    ". Cut x where a row of four begins.");
  const cuda::Float type = gpu::float_type("seeded_dropout", x);
  const gpu::Launch launch(x);
  const at::Tensor input = x.contiguous();
  at::Tensor output = at::empty_like(input);
  const cuda::MaskKey key{static_cast<uint64_t>(seed), static_cast<uint32_t>(micro_step), static_cast<uint32_t>(site),
                          static_cast<uint64_t>(first)};
  C10_CUDA_CHECK(cuda::seeded_dropout(type, input.const_data_ptr(), output.mutable_data_ptr(), input.numel(), key,
                                      dropout_threshold(p), static_cast<float>(1.0 / (1.0 - p)), launch.stream()));
  return output;
}

}  // namespace

TORCH_LIBRARY_IMPL(qlorapp, CUDA, m) { m.impl("seeded_dropout", seeded_dropout); }

}  // namespace qlorapp::ops
