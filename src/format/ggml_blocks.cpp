// SPDX-License-Identifier: Apache-2.0
#include "ggml_blocks.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>

#include "core/check.hpp"
#include "ggml_layout.hpp"

namespace qlorapp::format {
namespace {

/// Nearest, ties to even. NaN does not occur.
QLORAPP_INLINE uint16_t to_half(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7bffu);  // the largest number, not infinity
  if (magnitude < 0x38800000u) {                                               // subnormal
    const float shifted = std::bit_cast<float>(magnitude) * 0x1p24f;
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(std::nearbyint(shifted)));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

/// For scales: below the normal numbers, where the nearest may be half as large or 0, the next one that is no smaller.
QLORAPP_INLINE uint16_t to_scale(float value) {
  const uint16_t half = to_half(value);
  const bool is_short = (half & 0x7fffu) < 0x0400u && std::fabs(from_half(half)) < std::fabs(value);
  return static_cast<uint16_t>(half + (is_short ? 1 : 0));
}

QLORAPP_INLINE float inverse(float value) { return value == 0.0f ? 0.0f : 1.0f / value; }

/// Rounds to the nearest integer without a call, so that loops of it are vector instructions. |value| < 2^22.
QLORAPP_INLINE float rounded(float value) {
  constexpr float kShift = 0x1.8p23f;
  return (value + kShift) - kShift;
}

QLORAPP_INLINE float limited(float value, float least, float most) {
  const float above = value < least ? least : value;
  return above > most ? most : above;
}

template <int Count>
using Values = std::array<float, Count>;

/// Candidates are tried side by side, one in each lane of a vector: so every CPU adds in the same order.
constexpr int kCandidates = 16;
using Lanes = std::array<float, kCandidates>;

/// x ≈ scale·q with q from least to most.
template <int Count>
QLORAPP_INLINE float fit_scale(const Values<Count>& x, const Values<Count>& weight, float least, float most) {
  float extreme = 0;
  for (const float value : x) extreme = std::fabs(value) > std::fabs(extreme) ? value : extreme;
  if (extreme == 0.0f) return 0.0f;
  alignas(64) Lanes factor, xq{}, qq{};
  // The side with one integer more holds the extreme.
  for (int c = 0; c < kCandidates; ++c) factor[c] = (least - 0.1f * static_cast<float>(c - 7)) / extreme;
  for (int i = 0; i < Count; ++i) {
    const float value = x[i], wx = weight[i] * value, w = weight[i];
#pragma omp simd
    for (int c = 0; c < kCandidates; ++c) {
      const float q = limited(rounded(factor[c] * value), least, most);
      xq[c] += wx * q;
      qq[c] += w * q * q;
    }
  }
  // Equal but for rounding, the scale with which the extreme is the end of the range is the better one: float16 often holds it.
  int best = kCandidates / 2 - 1;
  const auto gain = [&](int c) { return qq[c] > 0 ? xq[c] * xq[c] / qq[c] : 0.0f; };  // what the fit takes off the sum of squares
  for (int c = 0; c < kCandidates; ++c) {
    if (gain(c) > gain(best) * 1.00001f) best = c;
  }
  return qq[best] > 0 ? xq[best] / qq[best] : 0.0f;
}

struct ScaleAndMin {
  float scale = 0, min = 0;
};

/// x ≈ scale·q - min with q from 0 to most, min ≥ 0.
template <int Count>
QLORAPP_INLINE ScaleAndMin fit_scale_and_min(const Values<Count>& x, const Values<Count>& weight, float most) {
  float low = 0, high = x[0], sum_w = 0, sum_x = 0, sum_xx = 0;
  for (int i = 0; i < Count; ++i) {
    low = x[i] < low ? x[i] : low;
    high = x[i] > high ? x[i] : high;
    sum_w += weight[i];
    sum_x += weight[i] * x[i];
    sum_xx += weight[i] * x[i] * x[i];
  }
  if (high <= low) return {0, -low};
  alignas(64) Lanes factor, sum_q{}, qq{}, xq{};
  for (int c = 0; c < kCandidates; ++c) factor[c] = (most + 0.15f * static_cast<float>(c - 7)) / (high - low);
  for (int i = 0; i < Count; ++i) {
    const float above = x[i] - low, wx = weight[i] * x[i], w = weight[i];
#pragma omp simd
    for (int c = 0; c < kCandidates; ++c) {
      const float q = limited(rounded(factor[c] * above), 0.0f, most);
      sum_q[c] += w * q;
      qq[c] += w * q * q;
      xq[c] += wx * q;
    }
  }
  ScaleAndMin best{(high - low) / most, -low};
  float best_error = std::numeric_limits<float>::infinity();
  for (int c = 0; c < kCandidates; ++c) {
    const float determinant = sum_w * qq[c] - sum_q[c] * sum_q[c];
    ScaleAndMin found{-1, -1};
    if (determinant > 0)
      found = {(sum_w * xq[c] - sum_x * sum_q[c]) / determinant, (sum_q[c] * xq[c] - qq[c] * sum_x) / determinant};
    if (found.min < 0) found = {qq[c] > 0 ? xq[c] / qq[c] : 0.0f, 0.0f};
    const float error = sum_xx + found.scale * found.scale * qq[c] + found.min * found.min * sum_w - 2 * found.scale * xq[c] +
                        2 * found.min * sum_x - 2 * found.scale * found.min * sum_q[c];
    if (error < best_error && found.scale >= 0) {
      best_error = error;
      best = found;
    }
  }
  return best;
}

/// The candidate with the least error of x ≈ scale·q - min, q from least to most.
template <int Count>
QLORAPP_INLINE int nearest(const Values<Count>& x, const Values<Count>& weight, const Lanes& scale, const Lanes& min, float least,
                           float most) {
  alignas(64) Lanes factor, error{};
  for (int c = 0; c < kCandidates; ++c) factor[c] = inverse(scale[c]);
  for (int i = 0; i < Count; ++i) {
    const float value = x[i], w = weight[i];
#pragma omp simd
    for (int c = 0; c < kCandidates; ++c) {
      const float q = limited(rounded(factor[c] * (value + min[c])), least, most);
      const float off = value + min[c] - scale[c] * q;
      error[c] += w * off * off;
    }
  }
  int best = 0;
  for (int c = 1; c < kCandidates; ++c) {
    if (error[c] < error[best]) best = c;
  }
  return best;
}

template <class Block>
Block* block_at(std::span<std::byte> into, size_t index) {
  static_assert(std::is_trivially_copyable_v<Block> && alignof(Block) == 1);
  return reinterpret_cast<Block*>(into.data() + index * sizeof(Block));
}

Half bytes_of(uint16_t half) { return std::bit_cast<Half>(half); }

template <int Count>
QLORAPP_INLINE Values<Count> values_at(std::span<const float> from, size_t begin) {
  Values<Count> values;
  std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(begin), Count, values.begin());
  return values;
}

template <int Count>
QLORAPP_INLINE Values<Count> weights_at(std::span<const float> importance, size_t begin) {
  Values<Count> ones;
  ones.fill(1.0f);
  return importance.empty() ? ones : values_at<Count>(importance, begin);
}

template <int Count>
QLORAPP_INLINE std::array<uint8_t, Count> integers(const Values<Count>& x, float scale, float min, float most) {
  std::array<uint8_t, Count> q;
  const float factor = inverse(scale);
  for (int i = 0; i < Count; ++i) q[i] = static_cast<uint8_t>(limited(rounded(factor * (x[i] + min)), 0.0f, most));
  return q;
}

QLORAPP_PER_CPU void q8_0(std::span<const float> row, std::span<const float> importance, std::span<std::byte> into) {
  (void)importance;  // 255 integers leave nothing to choose
  for (size_t i = 0; i < row.size() / 32; ++i) {
    const auto x = values_at<32>(row, i * 32);
    float most = 0;
    for (const float value : x) most = std::max(most, std::fabs(value));
    auto* const block = block_at<BlockQ8_0>(into, i);
    const uint16_t d = to_scale(most / 127);
    block->d = bytes_of(d);
    const float factor = inverse(from_half(d));
    for (int k = 0; k < 32; ++k) block->q[k] = static_cast<int8_t>(limited(rounded(factor * x[k]), -127.0f, 127.0f));
  }
}

QLORAPP_PER_CPU void q4_0(std::span<const float> row, std::span<const float> importance, std::span<std::byte> into) {
  for (size_t i = 0; i < row.size() / 32; ++i) {
    const auto x = values_at<32>(row, i * 32);
    const uint16_t d = to_scale(fit_scale<32>(x, weights_at<32>(importance, i * 32), -8, 7));
    auto* const block = block_at<BlockQ4_0>(into, i);
    block->d = bytes_of(d);
    const float factor = inverse(from_half(d));
    const auto q = [&](int k) { return static_cast<uint8_t>(limited(rounded(factor * x[k]), -8.0f, 7.0f) + 8.0f); };
    for (int k = 0; k < 16; ++k) block->q[k] = static_cast<uint8_t>(q(k) | (q(k + 16) << 4));
  }
}

/// Scales and mins of eight parts in six bits each.
struct SixBits {
  float d = 0, e = 0;
  std::array<uint8_t, 8> scale{}, min{};

  [[nodiscard]] std::array<uint8_t, 12> packed() const {
    std::array<uint8_t, 12> bytes{};
    for (size_t j = 0; j < 4; ++j) {
      bytes[j] = static_cast<uint8_t>(scale[j] | ((scale[j + 4] >> 4) << 6));
      bytes[j + 4] = static_cast<uint8_t>(min[j] | ((min[j + 4] >> 4) << 6));
      bytes[j + 8] = static_cast<uint8_t>((scale[j + 4] & 15) | ((min[j + 4] & 15) << 4));
    }
    return bytes;
  }
};

constexpr Lanes kScaleSteps{0, 0, 0, 0, 0, -1, -1, -1, -1, -1, 1, 1, 1, 1, 1, -2};
constexpr Lanes kMinSteps{0, -1, 1, -2, 2, 0, -1, 1, -2, 2, 0, -1, 1, -2, 2, 0};

/// The head of a block of Q4_K or Q5_K, and the integers of its parts.
template <class Block>
QLORAPP_INLINE std::array<std::array<uint8_t, 32>, 8> parts_of(std::span<const float> row, std::span<const float> importance,
                                                               size_t begin, float most, Block& block) {
  std::array<Values<32>, 8> x;
  std::array<ScaleAndMin, 8> fits;
  float largest_scale = 0, largest_min = 0;
  for (size_t j = 0; j < 8; ++j) {
    x[j] = values_at<32>(row, begin + 32 * j);
    fits[j] = fit_scale_and_min<32>(x[j], weights_at<32>(importance, begin + 32 * j), most);
    largest_scale = std::max(largest_scale, fits[j].scale);
    largest_min = std::max(largest_min, fits[j].min);
  }
  const uint16_t d = to_scale(largest_scale / 63), e = to_scale(largest_min / 63);
  SixBits six{from_half(d), from_half(e)};
  std::array<std::array<uint8_t, 32>, 8> parts;
  for (size_t j = 0; j < 8; ++j) {
    const float s = rounded(fits[j].scale * inverse(six.d)), m = rounded(fits[j].min * inverse(six.e));
    alignas(64) Lanes scale, min, s_at, m_at;
    for (int c = 0; c < kCandidates; ++c) {  // the first one is where rounding leads
      s_at[c] = limited(s + kScaleSteps[c], 0.0f, 63.0f);
      m_at[c] = limited(m + kMinSteps[c], 0.0f, 63.0f);
      scale[c] = six.d * s_at[c];
      min[c] = six.e * m_at[c];
    }
    const int best = nearest<32>(x[j], weights_at<32>(importance, begin + 32 * j), scale, min, 0, most);
    six.scale[j] = static_cast<uint8_t>(s_at[best]);
    six.min[j] = static_cast<uint8_t>(m_at[best]);
    parts[j] = integers<32>(x[j], six.d * six.scale[j], six.e * six.min[j], most);
  }
  block.d = bytes_of(d);
  block.min = bytes_of(e);
  block.scales = six.packed();
  return parts;
}

QLORAPP_PER_CPU void q4_k(std::span<const float> row, std::span<const float> importance, std::span<std::byte> into) {
  for (size_t i = 0; i < row.size() / 256; ++i) {
    auto* const block = block_at<BlockQ4_K>(into, i);
    const auto parts = parts_of(row, importance, i * 256, 15, *block);
    for (size_t pair = 0; pair < 4; ++pair) {
      for (size_t k = 0; k < 32; ++k)
        block->q[32 * pair + k] = static_cast<uint8_t>(parts[2 * pair][k] | (parts[2 * pair + 1][k] << 4));
    }
  }
}

QLORAPP_PER_CPU void q5_k(std::span<const float> row, std::span<const float> importance, std::span<std::byte> into) {
  for (size_t i = 0; i < row.size() / 256; ++i) {
    auto* const block = block_at<BlockQ5_K>(into, i);
    const auto parts = parts_of(row, importance, i * 256, 31, *block);
    block->high.fill(0);
    for (size_t pair = 0; pair < 4; ++pair) {
      for (size_t k = 0; k < 32; ++k) {
        const uint8_t a = parts[2 * pair][k], b = parts[2 * pair + 1][k];
        block->q[32 * pair + k] = static_cast<uint8_t>((a & 15) | ((b & 15) << 4));
        block->high[k] = static_cast<uint8_t>(block->high[k] | ((a >> 4) << (2 * pair)) | ((b >> 4) << (2 * pair + 1)));
      }
    }
  }
}

QLORAPP_PER_CPU void q6_k(std::span<const float> row, std::span<const float> importance, std::span<std::byte> into) {
  for (size_t i = 0; i < row.size() / 256; ++i) {
    std::array<Values<16>, 16> x;
    std::array<float, 16> scales;
    float extreme = 0;
    for (size_t j = 0; j < 16; ++j) {
      x[j] = values_at<16>(row, i * 256 + 16 * j);
      scales[j] = fit_scale<16>(x[j], weights_at<16>(importance, i * 256 + 16 * j), -32, 31);
      if (std::fabs(scales[j]) > std::fabs(extreme)) extreme = scales[j];
    }
    auto* const block = block_at<BlockQ6_K>(into, i);
    const uint16_t d = to_scale(extreme / -128);  // the scale of the extreme is -128
    const float step = from_half(d);
    block->d = bytes_of(d);
    std::array<uint8_t, 256> q;
    for (size_t j = 0; j < 16; ++j) {
      const float middle = rounded(scales[j] * inverse(step));
      alignas(64) Lanes candidates, whole;
      for (int c = 0; c < kCandidates; ++c) {
        const float away = static_cast<float>((c + 1) / 2);
        whole[c] = limited(middle + (c % 2 == 0 ? -away : away), -128.0f, 127.0f);
        candidates[c] = step * whole[c];
      }
      const Lanes none{};
      const float scale = whole[nearest<16>(x[j], weights_at<16>(importance, i * 256 + 16 * j), candidates, none, -32, 31)];
      block->scales[j] = static_cast<int8_t>(scale);
      const float factor = inverse(step * scale);
      for (size_t k = 0; k < 16; ++k)
        q[16 * j + k] = static_cast<uint8_t>(limited(rounded(factor * x[j][k]), -32.0f, 31.0f) + 32.0f);
    }
    for (size_t half = 0; half < 2; ++half) {
      const uint8_t* const from = q.data() + 128 * half;
      for (size_t k = 0; k < 32; ++k) {
        block->low[64 * half + k] = static_cast<uint8_t>((from[k] & 15) | ((from[k + 64] & 15) << 4));
        block->low[64 * half + 32 + k] = static_cast<uint8_t>((from[k + 32] & 15) | ((from[k + 96] & 15) << 4));
        block->high[32 * half + k] = static_cast<uint8_t>((from[k] >> 4) | ((from[k + 32] >> 4) << 2) | ((from[k + 64] >> 4) << 4) |
                                                          ((from[k + 96] >> 4) << 6));
      }
    }
  }
}

}  // namespace

namespace {
constexpr auto kQuantTypes = std::to_array<std::pair<QuantType, GgufType>>({{QuantType::kQ4_0, GgufType::kQ4_0},
                                                                            {QuantType::kQ4_1, GgufType::kQ4_1},
                                                                            {QuantType::kQ5_0, GgufType::kQ5_0},
                                                                            {QuantType::kQ5_1, GgufType::kQ5_1},
                                                                            {QuantType::kQ8_0, GgufType::kQ8_0},
                                                                            {QuantType::kQ4_K, GgufType::kQ4_K},
                                                                            {QuantType::kQ5_K, GgufType::kQ5_K},
                                                                            {QuantType::kQ6_K, GgufType::kQ6_K}});
}  // namespace

GgufType gguf_type_of(QuantType type) {
  return std::ranges::find(kQuantTypes, type, &std::pair<QuantType, GgufType>::first)->second;
}

std::optional<QuantType> quant_type_of(GgufType type) {
  const auto found = std::ranges::find(kQuantTypes, type, &std::pair<QuantType, GgufType>::second);
  return found == kQuantTypes.end() ? std::nullopt : std::optional(found->first);
}

void quantize_row(GgufType type, std::span<const float> row, std::span<const float> importance, std::span<std::byte> into) {
  const GgufBlock& block = block_of(type);
  QLORAPP_CHECK_VALUE(static_cast<int64_t>(row.size()) % block.elements == 0 &&
                          static_cast<int64_t>(into.size()) == static_cast<int64_t>(row.size()) / block.elements * block.bytes &&
                          (importance.empty() || importance.size() == row.size()),
                      "[gguf] a row of {} elements in {} must fill {} bytes in whole blocks; got {}.", row.size(), block.name,
                      static_cast<int64_t>(row.size()) / block.elements * block.bytes, into.size());
  switch (type) {
    case GgufType::kQ8_0:
      return q8_0(row, importance, into);
    case GgufType::kQ4_0:
      return q4_0(row, importance, into);
    case GgufType::kQ4_K:
      return q4_k(row, importance, into);
    case GgufType::kQ5_K:
      return q5_k(row, importance, into);
    case GgufType::kQ6_K:
      return q6_k(row, importance, into);
    default:
      break;
  }
  throw ValueError(message("[gguf] {} is read, not written.", block.name));
}

}  // namespace qlorapp::format
