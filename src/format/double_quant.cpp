// SPDX-License-Identifier: Apache-2.0
#include "format/double_quant.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>

namespace qlorapp {
namespace {

/// bitsandbytes' grid: point k stands for k / 32767.5 - 1.
using BnbGrid = std::array<uint8_t, 65536>;

const BnbGrid& bnb_grid(bool is_signed) {
  const auto build = [](bool with_sign) {
    const auto& midpoints = with_sign ? kSignedDynamicMidpoints : kUnsignedDynamicMidpoints;
    BnbGrid grid{};
    for (size_t k = 0; k < grid.size(); ++k)
      grid[k] = nearest_dynamic_code(midpoints, static_cast<double>(static_cast<float>(k) / 32767.5F - 1.0F));
    return grid;
  };
  static const BnbGrid signed_grid = build(true);
  static const BnbGrid unsigned_grid = build(false);
  return is_signed ? signed_grid : unsigned_grid;
}

void encode_block_nearest(const std::array<double, 255>& midpoints, const float* x, int64_t n, uint8_t* codes, float* absmax) {
  float largest = 0.0F;
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, std::fabs(x[i]));
  *absmax = largest;
  // 0 / 1 instead of 0 / 0: a block of zeros takes the code of zero.
  const double divisor = largest == 0.0F ? 1.0 : static_cast<double>(largest);
  for (int64_t i = 0; i < n; ++i) codes[i] = nearest_dynamic_code(midpoints, static_cast<double>(x[i]) / divisor);
}

void encode_block_bnb(const BnbGrid& grid, const float* x, int64_t n, uint8_t* codes, float* absmax) {
  float largest = 0.0F;
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, std::fabs(x[i]));  // a NaN on the right loses
  *absmax = largest;
  if (largest == 0.0F) {
    std::fill(codes, codes + n, uint8_t{0});
    return;
  }
  const float factor = 1.0F / largest;
  for (int64_t i = 0; i < n; ++i) {
    const float scaled = std::clamp(x[i] * factor, -1.0F, 1.0F);  // keeps NaN
    const float point = std::fma((scaled + 1.0F) * 0.5F, 65535.0F, 0.5F);
    codes[i] = std::isnan(point) ? uint8_t{0} : grid[static_cast<size_t>(point)];
  }
}

}  // namespace

void encode_dynamic(DynamicRounding rounding, bool is_signed, const float* x, int64_t n, int64_t block_size, int64_t block_begin,
                    int64_t block_end, uint8_t* codes, float* absmax) noexcept {
  for (int64_t block = block_begin; block < block_end; ++block) {
    const int64_t begin = block * block_size;
    const int64_t count = std::min(block_size, n - begin);
    if (rounding == DynamicRounding::kNearest)
      encode_block_nearest(is_signed ? kSignedDynamicMidpoints : kUnsignedDynamicMidpoints, x + begin, count, codes + begin,
                           absmax + block);
    else encode_block_bnb(bnb_grid(is_signed), x + begin, count, codes + begin, absmax + block);
  }
}

}  // namespace qlorapp
