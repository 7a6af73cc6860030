// SPDX-License-Identifier: Apache-2.0
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "../norm_entry.hpp"
#include "../row_views.hpp"
#include "cuda/norm.hpp"
#include "launch.hpp"

namespace qlorapp::ops {
namespace {

cuda::Rows read(const at::Tensor& rows) { return {rows.const_data_ptr(), rows.stride(0)}; }
cuda::WrittenRows written(const at::Tensor& rows) { return {rows.mutable_data_ptr(), rows.stride(0)}; }

struct Norm {
  static void normalize(const at::Tensor& x, const at::Tensor& weight, double eps, NormRule rule, const at::Tensor& y,
                        const at::Tensor& rstd) {
    const cuda::Float type = gpu::float_type("rms_norm", x);
    if (x.numel() == 0) return;
    const gpu::Launch launch(x);
    const at::Tensor in = as_rows(x), out = as_written_rows("rms_norm", "y", y), w = weight.contiguous();
    C10_CUDA_CHECK(cuda::rms_norm(type, read(in), w.const_data_ptr(), written(out), rstd.mutable_data_ptr<float>(), in.size(0),
                                  in.size(1), static_cast<float>(eps), rule, launch.stream()));
  }

  static void add_and_normalize(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight, double eps,
                                NormRule rule, const at::Tensor& sum, const at::Tensor& y, const at::Tensor& rstd) {
    const cuda::Float type = gpu::float_type("add_rms_norm", x);
    if (x.numel() == 0) return;
    const gpu::Launch launch(x);
    const at::Tensor in = as_rows(x), other = as_rows(residual), w = weight.contiguous();
    const at::Tensor total = as_written_rows("add_rms_norm", "sum", sum), out = as_written_rows("add_rms_norm", "y", y);
    C10_CUDA_CHECK(cuda::add_rms_norm(type, read(in), read(other), w.const_data_ptr(), written(total), written(out),
                                      rstd.mutable_data_ptr<float>(), in.size(0), in.size(1), static_cast<float>(eps), rule,
                                      launch.stream()));
  }

  /// @param accumulate  dx += the gradient, and dy becomes y.
  static void backward(const at::Tensor& dx, const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight,
                       const at::Tensor& rstd, NormRule rule, bool accumulate) {
    const cuda::Float type = gpu::float_type("rms_norm_backward", x);
    if (x.numel() == 0) return;
    const gpu::Launch launch(x);
    const at::Tensor in = as_rows(x), out = as_written_rows("rms_norm_backward_", "dx", dx);
    const at::Tensor grad = accumulate ? as_written_rows("rms_norm_backward_", "dy", dy) : as_rows(dy);
    const at::Tensor w = weight.contiguous(), statistic = rstd.contiguous();
    const cuda::WrittenRows y = accumulate ? written(grad) : cuda::WrittenRows{};
    C10_CUDA_CHECK(cuda::rms_norm_backward(type, read(grad), read(in), w.const_data_ptr(), statistic.const_data_ptr<float>(),
                                           written(out), y, accumulate, in.size(0), in.size(1), rule, launch.stream()));
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(qlorapp, CUDA, m) { NormEntry<Norm>::implement(m); }

}  // namespace qlorapp::ops
