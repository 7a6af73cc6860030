// SPDX-License-Identifier: Apache-2.0
/// Timing, with transformers' rounding of the logged figures.
#pragma once

#include <chrono>
#include <cmath>

namespace qlorapp {

inline double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

inline double rounded(double value, int digits) {
  const double scale = std::pow(10.0, digits);
  return std::round(value * scale) / scale;
}

}  // namespace qlorapp
