// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include "core/philox.hpp"

namespace qlorapp {
namespace {

at::Tensor seeded_dropout_cpu(const at::Tensor& x, double p, int64_t seed, int64_t micro_step, int64_t site, int64_t first) {
  TORCH_CHECK_VALUE(p >= 0.0 && p < 1.0, "[seeded_dropout] p must be in [0, 1); got ", p, ".");
  TORCH_CHECK_VALUE(first >= 0 && first % 4 == 0, "[seeded_dropout] first must be a multiple of 4; got ", first,
                    ". Cut x where a row of four begins.");
  const at::Tensor input = x.contiguous();
  at::Tensor output = at::empty_like(input);
  const DropoutKey key{static_cast<uint64_t>(seed), static_cast<uint32_t>(micro_step), static_cast<uint32_t>(site),
                       static_cast<uint64_t>(first)};
  const uint32_t threshold = dropout_threshold(p);
  const int64_t n = input.numel();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, input.scalar_type(), "seeded_dropout", [&] {
    using compute_t = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;
    const auto keep_scale = static_cast<compute_t>(1.0 / (1.0 - p));
    const scalar_t* in = input.const_data_ptr<scalar_t>();
    scalar_t* out = output.data_ptr<scalar_t>();
    at::parallel_for(0, (n + 3) / 4, 4096, [&](int64_t begin, int64_t end) {
      for (int64_t group = begin; group < end; ++group) {
        const auto bits = dropout_bits(key, static_cast<uint64_t>(group));
        for (int64_t i = group * 4, j = 0; i < n && j < 4; ++i, ++j) {
          const bool kept = bits[static_cast<size_t>(j)] >= threshold;
          out[i] = kept ? static_cast<scalar_t>(static_cast<compute_t>(in[i]) * keep_scale) : scalar_t(0);
        }
      }
    });
  });
  return output;
}

at::Tensor seeded_dropout_meta(const at::Tensor& x, double, int64_t, int64_t, int64_t, int64_t) {
  return at::empty_like(x, at::MemoryFormat::Contiguous);
}

}  // namespace
}  // namespace qlorapp

TORCH_LIBRARY_IMPL(qlorapp, CPU, m) { m.impl("seeded_dropout", qlorapp::seeded_dropout_cpu); }
TORCH_LIBRARY_IMPL(qlorapp, Meta, m) { m.impl("seeded_dropout", qlorapp::seeded_dropout_meta); }
