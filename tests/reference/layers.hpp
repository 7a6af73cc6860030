// SPDX-License-Identifier: Apache-2.0
/// Llama's pieces and their derivatives in double precision, as plain as the formulas: the oracle of tests/ops. Row-major.
#pragma once

#include <Eigen/Core>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
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

/// How a head's elements form the pairs that turn.
struct Rotary {
  int64_t width = 0;         ///< The first so many elements turn; 0: all.
  bool interleaved = false;  ///< Pairs (2i, 2i + 1) instead of (i, i + width / 2).
};

/// One head of width d at angles a_i: the i-th pair turned by a_i; the tables give cos and sin, (positions, pairs).
inline Values rope(const Values& x, int64_t heads, int64_t d, const Values& cos, const Values& sin,
                   const std::vector<int64_t>& positions, double direction, Rotary rotary = {}) {
  Values y = x;
  const int64_t pairs = (rotary.width == 0 ? d : rotary.width) / 2;
  for (std::size_t m = 0; m < positions.size(); ++m) {
    for (int64_t head = 0; head < heads; ++head) {
      const std::size_t begin =
          (m * static_cast<std::size_t>(heads) + static_cast<std::size_t>(head)) * static_cast<std::size_t>(d);
      for (int64_t i = 0; i < pairs; ++i) {
        const auto a = begin + static_cast<std::size_t>(rotary.interleaved ? 2 * i : i);
        const auto b = begin + static_cast<std::size_t>(rotary.interleaved ? 2 * i + 1 : i + pairs);
        const auto angle = static_cast<std::size_t>(positions[m] * pairs + i);
        const double c = cos[angle], s = direction * sin[angle];
        y[a] = x[a] * c - x[b] * s;
        y[b] = x[b] * c + x[a] * s;
      }
    }
  }
  return y;
}

enum class Activation { kSilu, kGeluTanh };

/// An activation and its derivative: silu(g) = g·σ(g); gelu_tanh(g) = g/2·(1 + tanh(√(2/π)·(g + 0.044715·g³))).
inline std::pair<double, double> activated(double g, Activation activation) {
  if (activation == Activation::kSilu) {
    const double s = 1 / (1 + std::exp(-g));
    return {g * s, s + g * s * (1 - s)};
  }
  const double scale = std::sqrt(2 / std::acos(-1.0)), cubic = 0.044715, t = std::tanh(scale * (g + cubic * g * g * g));
  return {g / 2 * (1 + t), (1 + t) / 2 + g / 2 * (1 - t * t) * scale * (1 + 3 * cubic * g * g)};
}

/// h = activation(gate) · up for gate_up (rows, 2·n); and the gradient of gate_up for a given dh.
struct SwiGlu {
  Values h, d_gate_up;
};
inline SwiGlu gated_activation(const Values& gate_up, const Values& dh, int64_t n, Activation activation = Activation::kSilu) {
  SwiGlu result{Values(dh.size()), Values(gate_up.size())};
  const Matrix both = rows(gate_up, 2 * n), d = rows(dh, n);
  for (int64_t m = 0; m < both.rows(); ++m) {
    for (int64_t i = 0; i < n; ++i) {
      const auto [value, slope] = activated(both(m, i), activation);
      rows(result.h, n)(m, i) = value * both(m, n + i);
      rows(result.d_gate_up, 2 * n)(m, i) = d(m, i) * both(m, n + i) * slope;
      rows(result.d_gate_up, 2 * n)(m, n + i) = d(m, i) * value;
    }
  }
  return result;
}

/// Causal attention within rows; q (M, H, d), k and v (M, H_kv, d). @param window  a query sees the last so many keys, its own among them; 0: all.
struct Attention {
  Values out, lse, dq, dk, dv;
};
inline Attention attention(const Values& q, const Values& k, const Values& v, const Values& dout, int64_t heads, int64_t kv_heads,
                           int64_t d, const std::vector<int64_t>& row_starts, double scale, int64_t window = 0) {
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
      for (int64_t i = 0; window > 0 && i < n; ++i) {
        for (int64_t j = 0; j <= i - window; ++j) p(i, j) = -std::numeric_limits<double>::infinity();
      }
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

/// How a product with the head becomes logits: z·factor, then cap·tanh(·/cap); 0: no cap.
struct Logits {
  double factor = 1, cap = 0;
};

/// Σ −log softmax(logits of h·Wᵀ)[target] over targets >= 0, and its gradients with respect to h and W.
struct CrossEntropy {
  double loss = 0;
  Values d_hidden, d_weight;
};
inline CrossEntropy linear_cross_entropy(const Values& hidden, const Values& weight, const std::vector<int64_t>& targets,
                                         int64_t width, Logits rule = {}) {
  Matrix logits = rule.factor * rows(hidden, width) * rows(weight, width).transpose();
  Matrix slopes = Matrix::Constant(logits.rows(), logits.cols(), rule.factor);
  if (rule.cap > 0) {
    const Matrix t = (logits / rule.cap).array().tanh();
    logits = rule.cap * t;
    slopes = rule.factor * (1 - t.array().square()).matrix();
  }
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
  d_logits = d_logits.cwiseProduct(slopes);
  rows(result.d_hidden, width) = d_logits * rows(weight, width);
  rows(result.d_weight, width) = d_logits.transpose() * rows(hidden, width);
  return result;
}

}  // namespace qlorapp::reference
