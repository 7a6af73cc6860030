// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <limits>

#include "adamw.hpp"
#include "format/dynamic_map.hpp"

namespace qlorapp::cuda {
namespace {

/// Entries whose upper midpoint lies below x: the code to begin with.
uint8_t below(const std::array<double, 255>& midpoints, double x) {
  return static_cast<uint8_t>(std::lower_bound(midpoints.begin(), midpoints.end(), x) - midpoints.begin());
}

/// The lower edge of a cell of magnitudes; cell 0 reaches down to zero.
double edge(int cell, int shift) {
  if (cell == 0) return 0.0;
  return std::bit_cast<float>((static_cast<uint32_t>(cell) + (DynamicMapTables::kLowest >> shift)) << shift);
}

void fill_midpoints(double* exact, float* rounded, const std::array<double, 255>& midpoints) {
  exact[0] = -std::numeric_limits<double>::infinity();
  std::copy(midpoints.begin(), midpoints.end(), exact + 1);
  exact[256] = std::numeric_limits<double>::infinity();
  std::transform(exact, exact + 257, rounded, [](double x) { return static_cast<float>(x); });
}

}  // namespace

void fill(DynamicMapTables& tables) {
  DynamicMapTables::Frequent& t = tables.frequent;
  fill_midpoints(tables.signed_midpoint, t.signed_midpoint, kSignedDynamicMidpoints);
  fill_midpoints(tables.unsigned_midpoint, t.unsigned_midpoint, kUnsignedDynamicMidpoints);
  std::copy(kSignedDynamicMap.begin(), kSignedDynamicMap.end(), t.signed_value);
  std::copy(kUnsignedDynamicMap.begin(), kUnsignedDynamicMap.end(), t.unsigned_value);
  for (int cell = 0; cell < DynamicMapTables::kSignedCells; ++cell) {
    t.signed_begin[0][cell] = below(kSignedDynamicMidpoints, edge(cell, DynamicMapTables::kSignedShift));
    t.signed_begin[1][cell] = below(kSignedDynamicMidpoints, -edge(cell + 1, DynamicMapTables::kSignedShift));
  }
  for (int cell = 0; cell < DynamicMapTables::kUnsignedCells; ++cell)
    t.unsigned_begin[cell] = below(kUnsignedDynamicMidpoints, edge(cell, DynamicMapTables::kUnsignedShift));
}

}  // namespace qlorapp::cuda
