// SPDX-License-Identifier: Apache-2.0
/// The element types of a safetensors file.
///
/// The order of the enumerators is part of the format's reference writer: it stores tensors by descending type, then by name,
/// so that those with the strictest alignment come first. Source: safetensors 0.8, `Dtype`.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace qlorapp::format {

enum class Dtype : uint8_t {
  kBool,
  kF4,
  kF6E2M3,
  kF6E3M2,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kF8E8M0,
  kF8E4M3Fnuz,
  kF8E5M2Fnuz,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kC64,
  kF64,
  kI64,
  kU64,
};
inline constexpr int kDtypeCount = 22;

/// @returns the spelling in a header, e.g. "BF16".
[[nodiscard]] std::string_view dtype_name(Dtype dtype);
/// @returns bits an element: 4, 6, 8, 16, 32 or 64.
[[nodiscard]] int64_t dtype_bits(Dtype dtype);
/// The other direction of dtype_name(); nullopt for another spelling.
[[nodiscard]] std::optional<Dtype> dtype_from_name(std::string_view name);

/// The three types that weights of a language model come in, as torch and config.json spell them: float32, float16, bfloat16.
[[nodiscard]] std::optional<Dtype> weight_dtype_from_torch_name(std::string_view name);
/// @returns e.g. "bfloat16". @throws ValueError for any other type.
[[nodiscard]] std::string_view torch_name(Dtype weight_dtype);

}  // namespace qlorapp::format
