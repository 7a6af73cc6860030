// SPDX-License-Identifier: Apache-2.0
/// A linear layer with LoRA or DoRA, and its derivatives, in double precision.
///
/// Source: Hu et al. 2021; Liu et al. 2024 (DoRA), whose norm is a constant for the derivative (section 4.3 there).
#pragma once

#include <Eigen/Core>

#include "reference/layers.hpp"

namespace qlorapp::reference {

struct LoraLayer {
  Matrix weight, a, b;  ///< (out, in), (r, in), (out, r).
  double scaling = 1;
  Matrix magnitude;  ///< (1, out): DoRA; empty: LoRA.

  /// ‖W + s·B·A‖, row by row: (1, out).
  [[nodiscard]] Matrix norm() const { return (weight + scaling * b * a).rowwise().norm().transpose(); }
};

/// y = x·Wᵀ + s·d·Aᵀ·Bᵀ with d = x·mask. With a magnitude m: y = x·Wᵀ + (c − 1)·(d·Wᵀ) + c·s·d·Aᵀ·Bᵀ, where c = m / norm by column.
/// And the gradients of Σ y · dy.
struct LoraPass {
  Matrix y, dx, da, db, d_magnitude;
};
inline LoraPass lora_pass(const LoraLayer& layer, const Matrix& x, const Matrix& mask, const Matrix& dy) {
  const bool is_dora = layer.magnitude.size() > 0;
  const Matrix norm = layer.norm(), ones = Matrix::Ones(1, layer.weight.rows());
  const Matrix c = is_dora ? Matrix(layer.magnitude.cwiseQuotient(norm)) : ones;
  const Matrix d = x.cwiseProduct(mask), low = d * layer.a.transpose();
  const Matrix update = layer.scaling * low * layer.b.transpose(), base = d * layer.weight.transpose();
  const auto by_column = [](const Matrix& factors) { return factors.row(0).asDiagonal(); };
  const Matrix scaled = dy * by_column(c), d_low = layer.scaling * scaled * layer.b;
  LoraPass pass;
  pass.y = x * layer.weight.transpose() + base * by_column(c - ones) + update * by_column(c);
  pass.da = d_low.transpose() * d;
  pass.db = layer.scaling * scaled.transpose() * low;
  pass.dx = dy * layer.weight + mask.cwiseProduct((scaled - dy) * layer.weight + d_low * layer.a);
  if (is_dora) pass.d_magnitude = dy.cwiseProduct(base + update).colwise().sum().cwiseQuotient(norm);
  return pass;
}

}  // namespace qlorapp::reference
