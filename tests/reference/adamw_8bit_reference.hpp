// SPDX-License-Identifier: Apache-2.0
/// One step of AdamW with eight-bit moments in double precision, written for reading: a linear search for the nearest code.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace qlorapp::reference {

struct Adam8bitState {
  std::vector<double> parameter;
  std::vector<uint8_t> code1, code2;
  std::vector<double> absmax1, absmax2;
};

/// The index of the entry nearest to x, the first of two equally near.
inline uint8_t nearest(const std::array<float, 256>& map, double x) {
  size_t best = 0;
  for (size_t k = 1; k < map.size(); ++k) {
    if (std::fabs(static_cast<double>(map[k]) - x) < std::fabs(static_cast<double>(map[best]) - x)) best = k;
  }
  return static_cast<uint8_t>(best);
}

inline void adamw_8bit_step(Adam8bitState& state, const std::vector<double>& gradient, const std::array<float, 256>& map1,
                            const std::array<float, 256>& map2, double step, double lr, double beta1, double beta2, double eps,
                            double weight_decay) {
  constexpr size_t kBlock = 256;
  const size_t n = gradient.size();
  for (size_t start = 0; start < n; start += kBlock) {
    const size_t end = std::min(n, start + kBlock);
    const size_t block = start / kBlock;
    std::vector<double> m, v;
    for (size_t i = start; i < end; ++i) {
      m.push_back(beta1 * map1[state.code1[i]] * state.absmax1[block] + (1 - beta1) * gradient[i]);
      v.push_back(beta2 * map2[state.code2[i]] * state.absmax2[block] + (1 - beta2) * gradient[i] * gradient[i]);
      const double mean = m.back() / (1 - std::pow(beta1, step));
      const double deviation = std::sqrt(v.back() / (1 - std::pow(beta2, step)));
      state.parameter[i] = state.parameter[i] * (1 - lr * weight_decay) - lr * mean / (deviation + eps);
    }
    double largest_m = 0, largest_v = 0;
    for (size_t i = 0; i < m.size(); ++i) {
      largest_m = std::max(largest_m, std::fabs(m[i]));
      largest_v = std::max(largest_v, v[i]);
    }
    state.absmax1[block] = largest_m;
    state.absmax2[block] = largest_v;
    for (size_t i = 0; i < m.size(); ++i) {
      state.code1[start + i] = nearest(map1, largest_m == 0 ? 0 : m[i] / largest_m);
      state.code2[start + i] = nearest(map2, largest_v == 0 ? 0 : v[i] / largest_v);
    }
  }
}

}  // namespace qlorapp::reference
