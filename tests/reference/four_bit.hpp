// SPDX-License-Identifier: Apache-2.0
/// Four-bit quantization once more, from its definition: double precision, nearest by distance, no thresholds, no tables but
/// the code books' published decimals. An oracle shares no code with what it judges.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace qlorapp::reference {

/// arXiv:2305.14314, appendix E.
inline constexpr std::array<double, 16> kNf4{-1.0,
                                             -0.6961928009986877,
                                             -0.5250730514526367,
                                             -0.39491748809814453,
                                             -0.28444138169288635,
                                             -0.18477343022823334,
                                             -0.09105003625154495,
                                             0.0,
                                             0.07958029955625534,
                                             0.16093020141124725,
                                             0.24611230194568634,
                                             0.33791524171829224,
                                             0.44070982933044434,
                                             0.5626170039176941,
                                             0.7229568362236023,
                                             1.0};
inline constexpr std::array<double, 16> kFp4{0.0, 0.0625 / 12,  8.0 / 12,  1.0,  4.0 / 12,  0.5,  2.0 / 12,  0.25,
                                             0.0, -0.0625 / 12, -8.0 / 12, -1.0, -4.0 / 12, -0.5, -2.0 / 12, -0.25};

struct FourBit {
  std::vector<int> codes;      ///< One an element.
  std::vector<double> absmax;  ///< One a block.
  std::vector<double> margin;  ///< How much nearer the nearest entry is than the next: small means either code is right.
};

inline FourBit quantize(const std::vector<float>& weight, int64_t block_size, const std::array<double, 16>& book) {
  FourBit result;
  const auto n = static_cast<int64_t>(weight.size());
  for (int64_t begin = 0; begin < n; begin += block_size) {
    const int64_t end = std::min(begin + block_size, n);
    double absmax = 0;
    for (int64_t i = begin; i < end; ++i) absmax = std::max(absmax, std::fabs(static_cast<double>(weight[static_cast<size_t>(i)])));
    result.absmax.push_back(absmax);
    for (int64_t i = begin; i < end; ++i) {
      const double scaled = absmax == 0 ? 0 : static_cast<double>(weight[static_cast<size_t>(i)]) / absmax;
      std::array<std::pair<double, int>, 16> distance;
      for (int c = 0; c < 16; ++c) distance[static_cast<size_t>(c)] = {std::fabs(scaled - book[static_cast<size_t>(c)]), c};
      std::sort(distance.begin(), distance.end());
      result.codes.push_back(distance[0].second);
      result.margin.push_back(distance[1].first - distance[0].first);
    }
  }
  return result;
}

}  // namespace qlorapp::reference
