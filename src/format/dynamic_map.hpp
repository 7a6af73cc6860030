// SPDX-License-Identifier: Apache-2.0
/// The 256 values that an eight-bit code can mean: a "dynamic" map, fine near zero and still fine near one. Torch-free.
///
/// For k = 0 … 6 the interval [0.1, 1] is cut into 2^k equal parts (2^(k+1) in the unsigned map), and the middle of each,
/// times 10^(k-6), is an entry — with both signs in the signed map. With 0 and 1 that makes 256 entries, sorted; the signed
/// map ends at -0.993 below and 1 above, and its 0 is code 127. All arithmetic in fp32.
///
/// Source: Dettmers 2016, arXiv:1511.04561; entries equal bitsandbytes' create_dynamic_map(signed) bit for bit
/// (tests/python/test_nf4_blockwise.py), so they are generated here, not pasted.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace qlorapp {

using DynamicMap = std::array<float, 256>;

[[nodiscard]] constexpr DynamicMap make_dynamic_map(bool is_signed) {
  DynamicMap map{};
  size_t filled = 0;
  constexpr std::array<float, 7> kPowers{1e-6F, 1e-5F, 1e-4F, 1e-3F, 1e-2F, 1e-1F, 1.0F};
  for (size_t k = 0; k < kPowers.size(); ++k) {
    const size_t parts = size_t{1} << (is_signed ? k : k + 1);
    const float step = (1.0F - 0.1F) / static_cast<float>(parts);
    // As torch.linspace on any CPU with FMA (its AVX2 and AVX-512 kernels; without FMA 42 signed entries differ by an ulp):
    // counted from the nearer end, product and sum rounded once. The double holds both exactly.
    // exactly).
    const auto boundary = [&](size_t i) {
      const bool near_start = i < (parts + 1) / 2;
      const double offset = static_cast<double>(step) * static_cast<double>(near_start ? i : parts - i);
      return static_cast<float>(near_start ? static_cast<double>(0.1F) + offset : 1.0 - offset);
    };
    for (size_t i = 0; i < parts; ++i) {
      const float entry = kPowers[k] * ((boundary(i) + boundary(i + 1)) / 2.0F);
      map[filled++] = entry;
      if (is_signed) map[filled++] = -entry;
    }
  }
  map[filled++] = 0.0F;
  map[filled++] = 1.0F;
  std::sort(map.begin(), map.end());
  return map;
}

inline constexpr DynamicMap kSignedDynamicMap = make_dynamic_map(true);
inline constexpr DynamicMap kUnsignedDynamicMap = make_dynamic_map(false);

/// From -0.993 to 1; entry 127 is 0.
[[nodiscard]] constexpr const DynamicMap& signed_dynamic_map() { return kSignedDynamicMap; }
/// From 0 to 1; entry 0 is 0.
[[nodiscard]] constexpr const DynamicMap& unsigned_dynamic_map() { return kUnsignedDynamicMap; }

/// Code of zero in the signed map; the unsigned one has it at 0.
inline constexpr uint8_t kSignedZeroCode = 127;
static_assert(kSignedDynamicMap[kSignedZeroCode] == 0.0F && kUnsignedDynamicMap[0] == 0.0F);
static_assert(kSignedDynamicMap[255] == 1.0F && kUnsignedDynamicMap[255] == 1.0F);

/// Exact midpoints of neighbors; each fits a double.
[[nodiscard]] constexpr std::array<double, 255> make_midpoints(const DynamicMap& map) {
  std::array<double, 255> midpoints{};
  for (size_t i = 0; i < midpoints.size(); ++i) midpoints[i] = (static_cast<double>(map[i]) + static_cast<double>(map[i + 1])) / 2;
  return midpoints;
}
inline constexpr std::array<double, 255> kSignedDynamicMidpoints = make_midpoints(kSignedDynamicMap);
inline constexpr std::array<double, 255> kUnsignedDynamicMidpoints = make_midpoints(kUnsignedDynamicMap);

/// Index of the entry nearest to a value in [-1, 1]; a tie goes to the lower one. Eight comparisons, no branch.
[[nodiscard]] constexpr uint8_t nearest_dynamic_code(const std::array<double, 255>& midpoints, double value) {
  size_t code = 0;
  for (size_t half = 128; half > 0; half /= 2) code += value > midpoints[code + half - 1] ? half : 0;
  return static_cast<uint8_t>(code);
}
static_assert(nearest_dynamic_code(kSignedDynamicMidpoints, 0.0) == kSignedZeroCode);

}  // namespace qlorapp
