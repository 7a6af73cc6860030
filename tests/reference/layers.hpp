// SPDX-License-Identifier: Apache-2.0
/// Llama's pieces and their derivatives in double precision, as plain as the formulas: the oracle of tests/ops. Row-major.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace reference {

using Values = std::vector<double>;

inline std::size_t at(int64_t row, int64_t column, int64_t width) { return static_cast<std::size_t>(row * width + column); }

/// y = x / sqrt(mean(x²) + eps) · w; and dx for a given dy.
struct RmsNorm {
  Values y, dx;
};
inline RmsNorm rms_norm(const Values& x, const Values& w, const Values& dy, double eps) {
  const auto n = static_cast<int64_t>(w.size()), rows = static_cast<int64_t>(x.size()) / n;
  RmsNorm result{Values(x.size()), Values(x.size())};
  for (int64_t r = 0; r < rows; ++r) {
    double squares = 0, dot = 0;
    for (int64_t i = 0; i < n; ++i) squares += x[at(r, i, n)] * x[at(r, i, n)];
    const double s = 1 / std::sqrt(squares / static_cast<double>(n) + eps);
    for (int64_t i = 0; i < n; ++i) dot += dy[at(r, i, n)] * w[at(0, i, n)] * x[at(r, i, n)];
    for (int64_t i = 0; i < n; ++i) {
      result.y[at(r, i, n)] = x[at(r, i, n)] * s * w[at(0, i, n)];
      result.dx[at(r, i, n)] = s * dy[at(r, i, n)] * w[at(0, i, n)] - s * s * s * x[at(r, i, n)] * dot / static_cast<double>(n);
    }
  }
  return result;
}

/// One head of width d at angles a_i: (x_i, x_{i + d/2}) turned by a_i; the tables give cos and sin.
inline Values rope(const Values& x, int64_t heads, int64_t d, const Values& cos, const Values& sin,
                   const std::vector<int64_t>& positions, double direction) {
  Values y(x.size());
  const int64_t half = d / 2;
  for (int64_t m = 0; m < static_cast<int64_t>(positions.size()); ++m) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t i = 0; i < half; ++i) {
        const double c = cos[at(positions[at(0, m, 0)], i, half)], s = direction * sin[at(positions[at(0, m, 0)], i, half)];
        const double a = x[at(m * heads + h, i, d)], b = x[at(m * heads + h, i + half, d)];
        y[at(m * heads + h, i, d)] = a * c - b * s;
        y[at(m * heads + h, i + half, d)] = b * c + a * s;
      }
    }
  }
  return y;
}

/// h = silu(gate) · up for gate_up (rows, 2·n); and the gradient of gate_up for a given dh.
struct SwiGlu {
  Values h, d_gate_up;
};
inline SwiGlu swiglu(const Values& gate_up, const Values& dh, int64_t n) {
  SwiGlu result{Values(dh.size()), Values(gate_up.size())};
  for (int64_t r = 0; r < static_cast<int64_t>(dh.size()) / n; ++r) {
    for (int64_t i = 0; i < n; ++i) {
      const double g = gate_up[at(r, i, 2 * n)], u = gate_up[at(r, n + i, 2 * n)], d = dh[at(r, i, n)];
      const double s = 1 / (1 + std::exp(-g));
      result.h[at(r, i, n)] = g * s * u;
      result.d_gate_up[at(r, i, 2 * n)] = d * u * (s + g * s * (1 - s));
      result.d_gate_up[at(r, n + i, 2 * n)] = d * g * s;
    }
  }
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
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t g = h / group;
      for (int64_t i = row_starts[r]; i < row_starts[r + 1]; ++i) {
        const int64_t first = row_starts[r], count = i - first + 1;
        Values p(static_cast<std::size_t>(count)), dp(p.size());
        double highest = -std::numeric_limits<double>::infinity(), total = 0, mean = 0;
        for (int64_t j = 0; j < count; ++j) {
          double dot = 0;
          for (int64_t e = 0; e < d; ++e) dot += q[at(i * heads + h, e, d)] * k[at((first + j) * kv_heads + g, e, d)];
          p[at(0, j, 0)] = dot * scale;
          highest = std::max(highest, dot * scale);
        }
        for (double& value : p) total += (value = std::exp(value - highest));
        result.lse[at(h, i, tokens)] = highest + std::log(total);
        for (int64_t j = 0; j < count; ++j) {
          p[at(0, j, 0)] /= total;
          for (int64_t e = 0; e < d; ++e) {
            const double dy = dout[at(i * heads + h, e, d)], value = v[at((first + j) * kv_heads + g, e, d)];
            result.out[at(i * heads + h, e, d)] += p[at(0, j, 0)] * value;
            result.dv[at((first + j) * kv_heads + g, e, d)] += p[at(0, j, 0)] * dy;
            dp[at(0, j, 0)] += dy * value;
          }
          mean += p[at(0, j, 0)] * dp[at(0, j, 0)];
        }
        for (int64_t j = 0; j < count; ++j) {
          const double ds = p[at(0, j, 0)] * (dp[at(0, j, 0)] - mean) * scale;
          for (int64_t e = 0; e < d; ++e) {
            result.dq[at(i * heads + h, e, d)] += ds * k[at((first + j) * kv_heads + g, e, d)];
            result.dk[at((first + j) * kv_heads + g, e, d)] += ds * q[at(i * heads + h, e, d)];
          }
        }
      }
    }
  }
  return result;
}

/// Σ −log softmax(h·Wᵀ)[target] over targets >= 0, and its gradient with respect to h.
struct CrossEntropy {
  double loss = 0;
  Values d_hidden;
};
inline CrossEntropy linear_cross_entropy(const Values& hidden, const Values& weight, const std::vector<int64_t>& targets,
                                         int64_t width) {
  const int64_t vocabulary = static_cast<int64_t>(weight.size()) / width;
  CrossEntropy result{0, Values(hidden.size())};
  for (int64_t m = 0; m < static_cast<int64_t>(targets.size()); ++m) {
    const int64_t target = targets[static_cast<std::size_t>(m)];
    if (target < 0) continue;
    Values p(static_cast<std::size_t>(vocabulary));
    double highest = -std::numeric_limits<double>::infinity(), total = 0;
    for (int64_t c = 0; c < vocabulary; ++c) {
      for (int64_t i = 0; i < width; ++i) p[at(0, c, 0)] += hidden[at(m, i, width)] * weight[at(c, i, width)];
      highest = std::max(highest, p[at(0, c, 0)]);
    }
    result.loss -= p[at(0, target, 0)] - highest;
    for (double& value : p) total += (value = std::exp(value - highest));
    result.loss += std::log(total);
    for (int64_t c = 0; c < vocabulary; ++c) {
      const double d = p[at(0, c, 0)] / total - (c == target ? 1 : 0);
      for (int64_t i = 0; i < width; ++i) result.d_hidden[at(m, i, width)] += d * weight[at(c, i, width)];
    }
  }
  return result;
}

}  // namespace reference
