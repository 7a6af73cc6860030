// SPDX-License-Identifier: Apache-2.0
// AdamW with eight-bit moments on the CPU: a block of 256 is decoded, updated and encoded again while it is in L1.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include <ATen/Parallel.h>
#include <torch/library.h>

#include "../adamw_check.hpp"
#include "format/dynamic_map.hpp"

// The compiler makes one body per instruction set and the loader picks. Fused products are written as std::fma, which rounds once on every
// CPU, and nothing else is contracted: all bodies give the same bits.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define QLORAPP_PER_CPU __attribute__((target_clones("avx512f", "fma", "default")))
#else
#define QLORAPP_PER_CPU
#endif

namespace qlorapp::ops {
namespace {

constexpr int64_t kBlock = kAdamW8bitBlock;
constexpr uint32_t kMagnitude = 0x7fffffffU;                           // everything of a float but its sign
constexpr uint32_t kFirstUnusable = std::bit_cast<uint32_t>(0x1p63F);  // a sum of squares from here on may not be finite
constexpr uint32_t kInfinity = std::bit_cast<uint32_t>(std::numeric_limits<float>::infinity());

/// Finds the code of the entry nearest to value / absmax: the number of midpoints below it, so that a tie gives the lower
/// code. A table indexed by the leading bits of an approximate quotient tells where to begin; its cells are narrower than
/// the map's entries are apart, and the decision itself compares double-precision products.
template <bool kSigned>
class NearestCode {
 public:
  NearestCode() : value_(kSigned ? signed_dynamic_map() : unsigned_dynamic_map()) {
    midpoint_.front() = -std::numeric_limits<double>::infinity();
    const auto& midpoints = kSigned ? kSignedDynamicMidpoints : kUnsignedDynamicMidpoints;
    std::copy(midpoints.begin(), midpoints.end(), midpoint_.begin() + 1);
    midpoint_.back() = std::numeric_limits<double>::infinity();
    for (size_t cell = 0; cell < kCells; ++cell) {
      const auto edge = [](size_t c) { return std::bit_cast<float>((static_cast<uint32_t>(c) + kFirstCell) << kShift); };
      begin_[0][cell] = below(cell == 0 ? 0.0 : static_cast<double>(edge(cell)));
      if (kSigned) begin_[1][cell] = below(-static_cast<double>(edge(cell + 1)));
    }
    zero_ = below(0.0);
  }

  [[nodiscard]] float operator[](uint8_t code) const { return value_[code]; }
  [[nodiscard]] uint8_t zero() const { return zero_; }

  void encode(const float* values, float absmax, uint8_t* codes, int64_t length) const {
    if (absmax == 0) {
      std::fill_n(codes, length, zero_);
      return;
    }
    // Below this, 1 / absmax overflows or is far off; the search then starts in the middle, which is slow and as exact.
    const float inverse = absmax < 1e-30F ? 0.0F : 1.0F / absmax;
    const double scale = absmax;
    for (int64_t i = 0; i < length; ++i) {
      const double value = values[i];
      const auto bits = std::bit_cast<uint32_t>(values[i] * inverse);
      const uint32_t cell = std::clamp((bits & kMagnitude) >> kShift, kFirstCell, kFirstCell + kCells - 1) - kFirstCell;
      size_t code = begin_[kSigned ? bits >> 31 : 0][cell];
      code += value > midpoint_[code + 1] * scale ? 1 : 0;
      while (value > midpoint_[code + 1] * scale) ++code;
      while (!(value > midpoint_[code] * scale)) --code;
      codes[i] = static_cast<uint8_t>(code);
    }
  }

 private:
  static constexpr uint32_t kShift = kSigned ? 16 : 15;  // 7 or 8 bits of mantissa
  static constexpr uint32_t kFirstCell = std::bit_cast<uint32_t>(0x1p-24F) >> kShift;
  static constexpr uint32_t kCells = (std::bit_cast<uint32_t>(1.0F) >> kShift) - kFirstCell + 1;

  [[nodiscard]] uint8_t below(double x) const {
    return static_cast<uint8_t>(std::lower_bound(midpoint_.begin() + 1, midpoint_.end() - 1, x) - (midpoint_.begin() + 1));
  }

  std::array<float, 256> value_;
  std::array<double, 257> midpoint_{};  // [k] lies between entries k − 1 and k; infinities at both ends
  std::array<std::array<uint8_t, kCells>, kSigned ? 2 : 1> begin_{};
  uint8_t zero_ = 0;
};

struct Coefficients {
  float beta1, one_minus_beta1, beta2, one_minus_beta2, correction2, eps, negative_step, decay;
  bool decays;
};

/// Updates decoded moments and parameters. @returns the bit patterns of max |m| and max v, which order as the values do.
QLORAPP_PER_CPU
std::array<uint32_t, 2> update_block(float* p, const float* g, float* m, float* v, int64_t length, const Coefficients& c) {
  uint32_t largest_m = 0;
  uint32_t largest_v = 0;
  if (c.decays) {
    for (int64_t i = 0; i < length; ++i) p[i] *= c.decay;
  }
  for (int64_t i = 0; i < length; ++i) {
    const float mean = std::fma(c.one_minus_beta1, g[i], m[i] * c.beta1);
    const float square = std::fma(c.one_minus_beta2 * g[i], g[i], v[i] * c.beta2);
    p[i] += c.negative_step * mean / (std::sqrt(square) / c.correction2 + c.eps);
    m[i] = mean;
    v[i] = square;
    largest_m = std::max(largest_m, std::bit_cast<uint32_t>(mean) & kMagnitude);
    largest_v = std::max(largest_v, std::bit_cast<uint32_t>(square));
  }
  return {largest_m, largest_v};
}

QLORAPP_PER_CPU
uint32_t largest_magnitude(const float* values, int64_t length, float factor) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < length; ++i) largest = std::max(largest, std::bit_cast<uint32_t>(values[i] * factor) & kMagnitude);
  return largest;
}

/// Refuses before anything is written.
void check_gradient(const float* gradient, int64_t n, float factor) {
  const uint32_t largest = at::parallel_reduce(
      int64_t{0}, n, int64_t{1} << 16, uint32_t{0},
      [&](int64_t begin, int64_t end, uint32_t so_far) {
        return std::max(so_far, largest_magnitude(gradient + begin, end - begin, factor));
      },
      [](uint32_t a, uint32_t b) { return std::max(a, b); });
  if (largest < kFirstUnusable) return;
  const auto* first = std::find_if(gradient, gradient + n,
                                   [&](float x) { return (std::bit_cast<uint32_t>(x * factor) & kMagnitude) >= kFirstUnusable; });
  TORCH_CHECK_VALUE(false, "[adamw_8bit_] every element of gradient must be finite and below 9.2e18; got ", *first,
                    " at flat index ", first - gradient,
                    ". Nothing was changed: skip this step, as GradScaler does, or look for the layer that overflows.");
}

/// A negative, infinite or NaN scale makes codes that no search can place; it comes from a damaged file.
void check_absmax(const char* name, const float* absmax, int64_t blocks) {
  const auto* bad = std::find_if(absmax, absmax + blocks, [](float x) { return std::bit_cast<uint32_t>(x) >= kInfinity; });
  TORCH_CHECK_VALUE(bad == absmax + blocks, "[adamw_8bit_] every ", name, " must be finite and >= 0; got ", *bad, " at block ",
                    bad - absmax, ". The optimizer state is damaged.");
}

void adamw_8bit_cpu(at::Tensor& parameter, const at::Tensor& gradient, at::Tensor& state1, at::Tensor& state2, at::Tensor& absmax1,
                    at::Tensor& absmax2, int64_t step, double lr, double beta1, double beta2, double eps, double weight_decay,
                    const std::optional<at::Tensor>& multiplier, const std::optional<at::Tensor>& skip) {
  detail::check_adamw_8bit(parameter, gradient, state1, state2, absmax1, absmax2, step, lr, beta1, beta2, eps, weight_decay,
                           multiplier, skip);
  if (detail::number_or(skip, 0.0F) != 0.0F) return;
  const float factor = detail::number_or(multiplier, 1.0F);
  const int64_t n = parameter.numel();
  const float* const g = gradient.const_data_ptr<float>();
  check_gradient(g, n, factor);
  check_absmax("absmax1", absmax1.const_data_ptr<float>(), absmax1.numel());
  check_absmax("absmax2", absmax2.const_data_ptr<float>(), absmax2.numel());

  static const NearestCode<true> first_moment;
  static const NearestCode<false> second_moment;
  const auto t = static_cast<double>(step);
  const Coefficients c{.beta1 = static_cast<float>(beta1),
                       .one_minus_beta1 = static_cast<float>(1 - beta1),
                       .beta2 = static_cast<float>(beta2),
                       .one_minus_beta2 = static_cast<float>(1 - beta2),
                       .correction2 = static_cast<float>(std::sqrt(1 - std::pow(beta2, t))),
                       .eps = static_cast<float>(eps),
                       .negative_step = static_cast<float>(-lr / (1 - std::pow(beta1, t))),
                       .decay = static_cast<float>(1 - lr * weight_decay),
                       .decays = weight_decay > 0};
  float* const p = parameter.data_ptr<float>();
  uint8_t* const code1 = state1.data_ptr<uint8_t>();
  uint8_t* const code2 = state2.data_ptr<uint8_t>();
  float* const scale1 = absmax1.data_ptr<float>();
  float* const scale2 = absmax2.data_ptr<float>();

  at::parallel_for(0, adamw_8bit_blocks(n), 64, [&](int64_t begin, int64_t end) {
    std::array<float, kBlock> m;
    std::array<float, kBlock> v;
    std::array<float, kBlock> scaled;
    for (int64_t block = begin; block < end; ++block) {
      const int64_t start = block * kBlock;
      const int64_t length = std::min(kBlock, n - start);
      for (int64_t i = 0; i < length; ++i) {
        m[static_cast<size_t>(i)] = first_moment[code1[start + i]] * scale1[block];
        v[static_cast<size_t>(i)] = second_moment[code2[start + i]] * scale2[block];
      }
      for (int64_t i = 0; i < length; ++i) scaled[static_cast<size_t>(i)] = g[start + i] * factor;
      const auto [largest_m, largest_v] = update_block(p + start, scaled.data(), m.data(), v.data(), length, c);
      scale1[block] = std::bit_cast<float>(largest_m);
      scale2[block] = std::bit_cast<float>(largest_v);
      first_moment.encode(m.data(), scale1[block], code1 + start, length);
      second_moment.encode(v.data(), scale2[block], code2 + start, length);
    }
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(qlorapp, CPU, m) { m.impl("adamw_8bit_", adamw_8bit_cpu); }

}  // namespace qlorapp::ops
