// SPDX-License-Identifier: Apache-2.0
#include <bit>
#include <cstring>
#include <type_traits>

#include "core/check.hpp"
#include "ggml_blocks.hpp"
#include "ggml_layout.hpp"

namespace qlorapp::format {
namespace {

/// Elements of the types without blocks.
struct ValueF16 {
  Half bits;
};
struct ValueBF16 {
  Half bits;
};

QLORAPP_INLINE float value_of(const Half& half) { return from_half(static_cast<uint16_t>(half[0] | (half[1] << 8))); }

/// Scale and min of the j-th 32 elements of a K block, in six bits.
struct ScaleMin {
  float scale, min;
};
template <class Block>
QLORAPP_INLINE ScaleMin scale_min(const Block& block, size_t j) {
  const auto& s = block.scales;
  const int scale = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | ((s[j - 4] >> 6) << 4);
  const int min = j < 4 ? s[j + 4] & 63 : (s[j + 4] >> 4) | ((s[j] >> 6) << 4);
  return {value_of(block.d) * static_cast<float>(scale), value_of(block.min) * static_cast<float>(min)};
}

QLORAPP_PER_CPU void expand(const BlockQ8_0* from, float* into, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const auto& block = from[i];
    const float d = value_of(block.d);
    for (size_t k = 0; k < 32; ++k) into[32 * i + k] = static_cast<float>(block.q[k]) * d;
  }
}

/// d·(q - Middle), or with a min d·q + m.
template <int Middle, class Block>
QLORAPP_INLINE void expand_32(const Block* from, float* into, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const auto& block = from[i];
    const float d = value_of(block.d);
    for (size_t k = 0; k < 32; ++k) {
      int q = k < 16 ? block.q[k] & 15 : block.q[k - 16] >> 4;
      if constexpr (requires { block.high; }) q |= ((block.high[k / 8] >> (k % 8)) & 1) << 4;
      const float product = d * static_cast<float>(q - Middle);
      if constexpr (requires { block.min; }) into[32 * i + k] = product + value_of(block.min);
      else into[32 * i + k] = product;
    }
  }
}
QLORAPP_PER_CPU void expand(const BlockQ4_0* from, float* into, size_t count) { expand_32<8>(from, into, count); }
QLORAPP_PER_CPU void expand(const BlockQ4_1* from, float* into, size_t count) { expand_32<0>(from, into, count); }
QLORAPP_PER_CPU void expand(const BlockQ5_0* from, float* into, size_t count) { expand_32<16>(from, into, count); }
QLORAPP_PER_CPU void expand(const BlockQ5_1* from, float* into, size_t count) { expand_32<0>(from, into, count); }

QLORAPP_PER_CPU void expand(const BlockQ4_K* from, float* into, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const auto& block = from[i];
    for (size_t pair = 0; pair < 4; ++pair) {
      const ScaleMin low = scale_min(block, 2 * pair), high = scale_min(block, 2 * pair + 1);
      const uint8_t* const q = block.q.data() + 32 * pair;
      float* const to = into + 256 * i + 64 * pair;
      for (size_t k = 0; k < 32; ++k) to[k] = low.scale * static_cast<float>(q[k] & 15) - low.min;
      for (size_t k = 0; k < 32; ++k) to[32 + k] = high.scale * static_cast<float>(q[k] >> 4) - high.min;
    }
  }
}

QLORAPP_PER_CPU void expand(const BlockQ5_K* from, float* into, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const auto& block = from[i];
    for (size_t j = 0; j < 8; ++j) {
      const ScaleMin part = scale_min(block, j);
      const uint8_t* const q = block.q.data() + 32 * (j / 2);
      const int shift = j % 2 == 0 ? 0 : 4;
      float* const to = into + 256 * i + 32 * j;
      for (size_t k = 0; k < 32; ++k)
        to[k] = part.scale * static_cast<float>(((q[k] >> shift) & 15) | (((block.high[k] >> j) & 1) << 4)) - part.min;
    }
  }
}

QLORAPP_PER_CPU void expand(const BlockQ6_K* from, float* into, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const auto& block = from[i];
    const float d = value_of(block.d);
    for (size_t j = 0; j < 8; ++j) {  // 32 elements, two scales
      const size_t half = j / 4, quarter = j % 4;
      const uint8_t* const low = block.low.data() + 64 * half + 32 * (quarter % 2);
      const uint8_t* const high = block.high.data() + 32 * half;
      const int shift = quarter < 2 ? 0 : 4, high_shift = static_cast<int>(2 * quarter);
      const float first = d * static_cast<float>(block.scales[2 * j]), second = d * static_cast<float>(block.scales[2 * j + 1]);
      float* const to = into + 256 * i + 32 * j;
      for (size_t k = 0; k < 32; ++k) {
        const int q = (((low[k] >> shift) & 15) | (((high[k] >> high_shift) & 3) << 4)) - 32;
        to[k] = (k < 16 ? first : second) * static_cast<float>(q);
      }
    }
  }
}

template <class Block>
bool has_finite_scales(const Block* from, size_t count) {
  const auto is_finite = [](const Half& half) { return (half[1] & 0x7C) != 0x7C; };
  for (size_t i = 0; i < count; ++i) {
    const auto& block = from[i];
    if (!is_finite(block.d)) return false;
    if constexpr (requires { block.min; }) {
      if (!is_finite(block.min)) return false;
    }
  }
  return true;
}

QLORAPP_PER_CPU void expand(const ValueF16* from, float* into, size_t count) {
  for (size_t i = 0; i < count; ++i) into[i] = value_of(from[i].bits);
}
QLORAPP_PER_CPU void expand(const ValueBF16* from, float* into, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const Half& half = from[i].bits;
    into[i] = std::bit_cast<float>(static_cast<uint32_t>(half[0] | (half[1] << 8)) << 16);
  }
}

/// @param use  is called with the blocks, of their own type, and their number.
template <class Use>
auto with_blocks(GgufType type, std::span<const std::byte> from, const Use& use) {
  const auto as = [&]<class Block>(std::type_identity<Block>) {
    return use(reinterpret_cast<const Block*>(from.data()), from.size() / sizeof(Block));
  };
  switch (type) {
    case GgufType::kF16:
      return as(std::type_identity<ValueF16>());
    case GgufType::kBF16:
      return as(std::type_identity<ValueBF16>());
    case GgufType::kQ4_0:
      return as(std::type_identity<BlockQ4_0>());
    case GgufType::kQ4_1:
      return as(std::type_identity<BlockQ4_1>());
    case GgufType::kQ5_0:
      return as(std::type_identity<BlockQ5_0>());
    case GgufType::kQ5_1:
      return as(std::type_identity<BlockQ5_1>());
    case GgufType::kQ8_0:
      return as(std::type_identity<BlockQ8_0>());
    case GgufType::kQ4_K:
      return as(std::type_identity<BlockQ4_K>());
    case GgufType::kQ5_K:
      return as(std::type_identity<BlockQ5_K>());
    case GgufType::kQ6_K:
      return as(std::type_identity<BlockQ6_K>());
    case GgufType::kF32:
      break;
  }
  throw Error("[gguf] float32 has no blocks");
}

}  // namespace

bool scales_are_finite(GgufType type, std::span<const std::byte> from) {
  return with_blocks(type, from, []<class Block>(const Block* blocks, size_t count) {
    if constexpr (requires { blocks->d; }) return has_finite_scales(blocks, count);
    else return true;
  });
}

void dequantize_row(GgufType type, std::span<const std::byte> from, std::span<float> into) {
  const GgufBlock& block = block_of(type);
  const size_t count = into.size() / static_cast<size_t>(block.elements);
  QLORAPP_CHECK_VALUE(static_cast<int64_t>(into.size()) % block.elements == 0 &&
                          static_cast<int64_t>(from.size()) == static_cast<int64_t>(count) * block.bytes,
                      "[gguf] {} elements in {} must come from whole blocks; got {} bytes.", into.size(), block.name, from.size());
  if (type == GgufType::kF32) std::memcpy(into.data(), from.data(), from.size());
  else with_blocks(type, from, [&](const auto* blocks, size_t) { expand(blocks, into.data(), count); });
}

}  // namespace qlorapp::format
