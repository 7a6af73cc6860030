// SPDX-License-Identifier: Apache-2.0
#include "dense_linear.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>

#include "cpu/few_rows.hpp"

namespace qlorapp::ops {
namespace {

bool has_few_rows(const at::Tensor& x, const at::Tensor& weight) {
  return x.is_cpu() && weight.is_cpu() && x.dim() == 2 && x.size(0) > 0 && x.size(0) <= cpu::kFewRows && x.size(1) > 0 &&
         x.scalar_type() == weight.scalar_type();
}

}  // namespace

void dense_linear_out(at::Tensor& y, const at::Tensor& x, const at::Tensor& weight, bool accumulate) {
  if (y.is_meta()) return;
  if (has_few_rows(x, weight) && cpu::multiply_few_rows(y, x, weight, accumulate)) return;
  if (accumulate) at::addmm_out(y, y, x, weight.t());
  else at::mm_out(y, x, weight.t());
}

at::Tensor dense_linear(const at::Tensor& x, const at::Tensor& weight) {
  const bool keeps_gradient = at::GradMode::is_enabled() && (x.requires_grad() || weight.requires_grad());
  if (keeps_gradient || !has_few_rows(x, weight)) return at::linear(x, weight);
  at::Tensor y = at::empty({x.size(0), weight.size(0)}, x.options());
  return cpu::multiply_few_rows(y, x, weight, /*accumulate=*/false) ? y : at::linear(x, weight);
}

}  // namespace qlorapp::ops
