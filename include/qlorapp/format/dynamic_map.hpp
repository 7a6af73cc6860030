// SPDX-License-Identifier: Apache-2.0
/// The two 256-entry maps of "dynamic" eight-bit numbers: what a code means, as a fraction of its block's absmax.
///
/// The map spends its codes on decades: decade i = 0 … 6 holds 2^i (signed, times two signs) or 2^(i+1) (unsigned) values,
/// the midpoints of equal cuts of [0.1, 1], times 10^(i-6); then 0 and +1 are added and everything is sorted. Small
/// numbers keep their magnitude, large ones their digits.
///
/// Source: Dettmers 2016, arXiv:1511.04561 §2 (dynamic tree quantization). Roundings are those of
/// bitsandbytes.functional.create_dynamic_map, whose tables equal these bit for bit.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <vector>

namespace qlorapp {
namespace detail {

inline std::array<float, 256> dynamic_map(bool is_signed) {
  constexpr std::array<float, 7> kDecade{1e-6F, 1e-5F, 1e-4F, 1e-3F, 1e-2F, 1e-1F, 1.0F};
  std::array<float, 256> map{};
  size_t filled = 0;
  for (size_t i = 0; i < kDecade.size(); ++i) {
    const size_t cuts = (size_t{1} << i) * (is_signed ? 1 : 2);
    const float step = (1.0F - 0.1F) / static_cast<float>(cuts);
    std::vector<float> bound(cuts + 1);  // counted from the nearer end, as torch.linspace does
    for (size_t k = 0; k <= cuts; ++k) {
      bound[k] = k < (cuts + 1) / 2 ? 0.1F + step * static_cast<float>(k) : 1.0F - step * static_cast<float>(cuts - k);
    }
    for (size_t k = 0; k < cuts; ++k) {
      const float value = kDecade[i] * ((bound[k] + bound[k + 1]) / 2.0F);
      map[filled++] = value;
      if (is_signed) map[filled++] = -value;
    }
  }
  map[filled++] = 0.0F;
  map[filled++] = 1.0F;
  std::sort(map.begin(), map.end());
  return map;
}

}  // namespace detail

/// From -0.99296875 to 1; entry 127 is 0.
inline std::array<float, 256> signed_dynamic_map() { return detail::dynamic_map(true); }

/// From 0 to 1; entry 0 is 0.
inline std::array<float, 256> unsigned_dynamic_map() { return detail::dynamic_map(false); }

}  // namespace qlorapp
