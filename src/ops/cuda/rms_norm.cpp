// SPDX-License-Identifier: Apache-2.0
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "../layer_shapes.hpp"
#include "../row_views.hpp"
#include "cuda/norm.hpp"
#include "launch.hpp"

namespace qlorapp::ops {
namespace {

cuda::Rows read(const at::Tensor& rows) { return {rows.const_data_ptr(), rows.stride(0)}; }
cuda::WrittenRows written(const at::Tensor& rows) { return {rows.mutable_data_ptr(), rows.stride(0)}; }

void normalize_into(const at::Tensor& x, const at::Tensor& weight, double eps, const at::Tensor& y, const at::Tensor& rstd) {
  const cuda::Float type = gpu::float_type("rms_norm", x);
  if (x.numel() == 0) return;
  const gpu::Launch launch(x);
  const at::Tensor in = as_rows(x), out = as_written_rows("rms_norm", "y", y), w = weight.contiguous();
  C10_CUDA_CHECK(cuda::rms_norm(type, read(in), w.const_data_ptr(), written(out), rstd.mutable_data_ptr<float>(), in.size(0),
                                in.size(1), static_cast<float>(eps), launch.stream()));
}

at::Tensor empty_statistic(const at::Tensor& x) {
  return at::empty(x.sizes().slice(0, x.sizes().size() - 1), x.options().dtype(at::kFloat));
}

std::tuple<at::Tensor, at::Tensor> rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  check_rms_norm("rms_norm", x, weight);
  at::Tensor y = at::empty_like(x, at::MemoryFormat::Contiguous), rstd = empty_statistic(x);
  normalize_into(x, weight, eps, y, rstd);
  return {y, rstd};
}

void rms_norm_out(const at::Tensor& x, const at::Tensor& weight, double eps, at::Tensor& y, at::Tensor& rstd) {
  check_rms_norm("rms_norm", x, weight);
  check_rms_norm_out("rms_norm", x, y, rstd);
  normalize_into(x, weight, eps, y, rstd);
}

void add_and_normalize_into(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight, double eps,
                            const at::Tensor& sum, const at::Tensor& y, const at::Tensor& rstd) {
  const cuda::Float type = gpu::float_type("add_rms_norm", x);
  if (x.numel() == 0) return;
  const gpu::Launch launch(x);
  const at::Tensor in = as_rows(x), other = as_rows(residual), w = weight.contiguous();
  const at::Tensor total = as_written_rows("add_rms_norm", "sum", sum), out = as_written_rows("add_rms_norm", "y", y);
  C10_CUDA_CHECK(cuda::add_rms_norm(type, read(in), read(other), w.const_data_ptr(), written(total), written(out),
                                    rstd.mutable_data_ptr<float>(), in.size(0), in.size(1), static_cast<float>(eps),
                                    launch.stream()));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x, const at::Tensor& residual,
                                                            const at::Tensor& weight, double eps) {
  check_rms_norm("add_rms_norm", x, weight);
  check_same_shape("add_rms_norm", "residual", residual, "x", x);
  at::Tensor sum = at::empty_like(x, at::MemoryFormat::Contiguous), y = at::empty_like(sum), rstd = empty_statistic(x);
  add_and_normalize_into(x, residual, weight, eps, sum, y, rstd);
  return {sum, y, rstd};
}

void add_rms_norm_out(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight, double eps, at::Tensor& sum,
                      at::Tensor& y, at::Tensor& rstd) {
  check_rms_norm("add_rms_norm", x, weight);
  check_same_shape("add_rms_norm", "residual", residual, "x", x);
  check_same_shape("add_rms_norm", "sum", sum, "x", x);
  check_rms_norm_out("add_rms_norm", x, y, rstd);
  add_and_normalize_into(x, residual, weight, eps, sum, y, rstd);
}

void backward_into(const at::Tensor& dx, const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight,
                   const at::Tensor& rstd, bool accumulate) {
  const cuda::Float type = gpu::float_type("rms_norm_backward", x);
  if (x.numel() == 0) return;
  const gpu::Launch launch(x);
  const at::Tensor in = as_rows(x), grad = as_rows(dy), out = as_written_rows("rms_norm_backward_", "dx", dx);
  const at::Tensor w = weight.contiguous(), statistic = rstd.contiguous();
  C10_CUDA_CHECK(cuda::rms_norm_backward(type, read(grad), read(in), w.const_data_ptr(), statistic.const_data_ptr<float>(),
                                         written(out), accumulate, in.size(0), in.size(1), launch.stream()));
}

at::Tensor rms_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& rstd) {
  check_rms_norm_backward("rms_norm_backward", dy, x, weight, rstd);
  at::Tensor dx = at::empty_like(x, at::MemoryFormat::Contiguous);
  backward_into(dx, dy, x, weight, rstd, false);
  return dx;
}

void rms_norm_backward_(at::Tensor& dx, const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight,
                        const at::Tensor& rstd) {
  check_rms_norm_backward("rms_norm_backward_", dy, x, weight, rstd);
  check_same_shape("rms_norm_backward_", "dx", dx, "x", x);
  backward_into(dx, dy, x, weight, rstd, true);
}

}  // namespace

TORCH_LIBRARY_IMPL(qlorapp, CUDA, m) {
  m.impl("rms_norm", rms_norm);
  m.impl("rms_norm.out", rms_norm_out);
  m.impl("rms_norm_backward", rms_norm_backward);
  m.impl("rms_norm_backward_", rms_norm_backward_);
  m.impl("add_rms_norm", add_rms_norm);
  m.impl("add_rms_norm.out", add_rms_norm_out);
}

}  // namespace qlorapp::ops
