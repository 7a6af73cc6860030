// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/core/units.hpp"

#include <array>
#include <cmath>
#include <cstdio>

namespace qlorapp {

std::string to_string(Bytes bytes) {
  static constexpr std::array<const char*, 5> kUnits{"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes.count);
  size_t unit = 0;
  while (std::fabs(value) >= 1024.0 && unit + 1 < kUnits.size()) {
    value /= 1024.0;
    ++unit;
  }
  const double magnitude = std::fabs(value);
  const int digits = unit == 0 || magnitude >= 100 ? 0 : magnitude >= 10 ? 1 : 2;
  std::array<char, 48> buffer{};
  std::snprintf(buffer.data(), buffer.size(), "%.*f %s", digits, value, kUnits[unit]);
  return buffer.data();
}

}  // namespace qlorapp
