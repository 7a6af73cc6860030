// SPDX-License-Identifier: Apache-2.0
// Products into tensors that are there. On Meta nothing happens: a plan must see no memory where none is taken, and torch's Python package, where
// it is imported, replaces these operators' Meta kernels by its own, which make another result first (torch/_meta_registrations.py).
#pragma once

#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

namespace qlorapp {

/// y = a · b, plus a bias for each column if there is one.
inline void product_into(at::Tensor& y, const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias = {}) {
  if (y.is_meta()) return;
  bias.defined() ? at::addmm_out(y, bias, a, b) : at::mm_out(y, a, b);
}

/// y += alpha · a · b.
inline void add_product(at::Tensor& y, const at::Tensor& a, const at::Tensor& b, double alpha = 1) {
  if (!y.is_meta()) at::addmm_out(y, y, a, b, 1, alpha);
}

}  // namespace qlorapp
