// SPDX-License-Identifier: Apache-2.0
/// Llama's pieces and their derivatives in double precision, as plain as the formulas: the oracle of tests/ops. Row-major.
#pragma once

#include <Eigen/Core>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace qlorapp::reference {

using Values = std::vector<double>;
using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

/// Values seen as a matrix of that width, without a copy.
inline Eigen::Map<const Matrix> rows(const Values& x, int64_t width) {
  return {x.data(), static_cast<int64_t>(x.size()) / width, width};
}
Eigen::Map<const Matrix> rows(Values&& x, int64_t width) = delete;  // whose memory is gone before the view
inline Eigen::Map<Matrix> rows(Values& x, int64_t width) { return {x.data(), static_cast<int64_t>(x.size()) / width, width}; }

/// y = x / sqrt(mean(x²) + eps) · w; and dx for a given dy.
struct RmsNorm {
  Values y, dx;
};
inline RmsNorm rms_norm(const Values& x, const Values& w, const Values& dy, double eps) {
  const auto n = static_cast<int64_t>(w.size());
  const Eigen::RowVectorXd weight = rows(w, n);
  const Eigen::VectorXd s = (rows(x, n).rowwise().squaredNorm().array() / static_cast<double>(n) + eps).rsqrt();
  const Matrix normal = s.asDiagonal() * rows(x, n), d_normal = rows(dy, n) * weight.asDiagonal();
  const Eigen::VectorXd mean = normal.cwiseProduct(d_normal).rowwise().mean();
  RmsNorm result{Values(x.size()), Values(x.size())};
  rows(result.y, n) = normal * weight.asDiagonal();
  rows(result.dx, n) = s.asDiagonal() * (d_normal - mean.asDiagonal() * normal);
  return result;
}

/// One head of width d at angles a_i: (x_i, x_{i + d/2}) turned by a_i; the tables give cos and sin.
inline Values rope(const Values& x, int64_t heads, int64_t d, const Values& cos, const Values& sin,
                   const std::vector<int64_t>& positions, double direction) {
  Values y(x.size());
  const int64_t half = d / 2;
  for (int64_t m = 0; m < static_cast<int64_t>(positions.size()); ++m) {
    const int64_t position = positions[static_cast<std::size_t>(m)];
    const Eigen::RowVectorXd c = rows(cos, half).row(position), s = direction * rows(sin, half).row(position);
    const Matrix in = rows(x, d).middleRows(m * heads, heads), a = in.leftCols(half), b = in.rightCols(half);
    rows(y, d).middleRows(m * heads, heads) << a * c.asDiagonal() - b * s.asDiagonal(), b * c.asDiagonal() + a * s.asDiagonal();
  }
  return y;
}

/// h = silu(gate) · up for gate_up (rows, 2·n); and the gradient of gate_up for a given dh.
struct SwiGlu {
  Values h, d_gate_up;
};
inline SwiGlu swiglu(const Values& gate_up, const Values& dh, int64_t n) {
  using Array = Eigen::Array<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const Array gate = rows(gate_up, 2 * n).leftCols(n), up = rows(gate_up, 2 * n).rightCols(n), d = rows(dh, n);
  const Array s = (1 + (-gate).exp()).inverse();
  SwiGlu result{Values(dh.size()), Values(gate_up.size())};
  rows(result.h, n) = gate * s * up;
  rows(result.d_gate_up, 2 * n) << (d * up * (s + gate * s * (1 - s))).matrix(), (d * gate * s).matrix();
  return result;
}

/// Causal attention within rows; q (M, H, d), k and v (M, H_kv, d).
struct Attention {
  Values out, lse, dq, dk, dv;
};
inline Attention attention(const Values& q, const Values& k, const Values& v, const Values& dout, int64_t heads, int64_t kv_heads,
                           int64_t d, const std::vector<int64_t>& row_starts, double scale) {
  const int64_t tokens = row_starts.back(), group = heads / kv_heads;
  Attention result{Values(q.size()), Values(static_cast<std::size_t>(heads * tokens)), Values(q.size()), Values(k.size()),
                   Values(v.size())};
  for (std::size_t r = 0; r + 1 < row_starts.size(); ++r) {
    const int64_t first = row_starts[r], n = row_starts[r + 1] - first;
    if (n == 0) continue;  // no highest score to find
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t g = h / group;
      const Matrix query = rows(q, heads * d).block(first, h * d, n, d), key = rows(k, kv_heads * d).block(first, g * d, n, d);
      const Matrix value = rows(v, kv_heads * d).block(first, g * d, n, d), dy = rows(dout, heads * d).block(first, h * d, n, d);
      Matrix p = scale * query * key.transpose();
      p.triangularView<Eigen::StrictlyUpper>().setConstant(-std::numeric_limits<double>::infinity());
      const Eigen::VectorXd highest = p.rowwise().maxCoeff();
      p = (p.colwise() - highest).array().exp();
      const Eigen::VectorXd total = p.rowwise().sum();
      rows(result.lse, tokens).row(h).segment(first, n) = highest + total.array().log().matrix();
      p.array().colwise() /= total.array();
      rows(result.out, heads * d).block(first, h * d, n, d) = p * value;
      rows(result.dv, kv_heads * d).block(first, g * d, n, d) += p.transpose() * dy;
      const Matrix dp = dy * value.transpose();
      const Eigen::VectorXd mean = p.cwiseProduct(dp).rowwise().sum();
      const Matrix ds = scale * p.cwiseProduct(dp.colwise() - mean);
      rows(result.dq, heads * d).block(first, h * d, n, d) = ds * key;
      rows(result.dk, kv_heads * d).block(first, g * d, n, d) += ds.transpose() * query;
    }
  }
  return result;
}

/// Σ −log softmax(h·Wᵀ)[target] over targets >= 0, and its gradients with respect to h and W.
struct CrossEntropy {
  double loss = 0;
  Values d_hidden, d_weight;
};
inline CrossEntropy linear_cross_entropy(const Values& hidden, const Values& weight, const std::vector<int64_t>& targets,
                                         int64_t width) {
  const Matrix logits = rows(hidden, width) * rows(weight, width).transpose();
  Matrix d_logits = Matrix::Zero(logits.rows(), logits.cols());
  CrossEntropy result{0, Values(hidden.size()), Values(weight.size())};
  for (int64_t m = 0; m < logits.rows(); ++m) {
    const int64_t target = targets[static_cast<std::size_t>(m)];
    if (target < 0) continue;
    const double highest = logits.row(m).maxCoeff();
    const Eigen::RowVectorXd p = (logits.row(m).array() - highest).exp();
    result.loss += highest + std::log(p.sum()) - logits(m, target);
    d_logits.row(m) = p / p.sum();
    d_logits(m, target) -= 1;
  }
  rows(result.d_hidden, width) = d_logits * rows(weight, width);
  rows(result.d_weight, width) = d_logits.transpose() * rows(hidden, width);
  return result;
}

}  // namespace qlorapp::reference
