// SPDX-License-Identifier: Apache-2.0
/// The JSON part of a safetensors file, read event by event: no tree is built, so a hostile header costs what it weighs.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "format/safetensors.hpp"

namespace qlorapp::format {

struct SafetensorsHeader {
  std::vector<TensorEntry> tensors;  ///< In the order of their bytes; `offset` counts from the data's first byte.
  Metadata metadata;
};

/// @param data_bytes  Length of what follows the header in the file.
/// @throws FormatError naming `where`.
[[nodiscard]] SafetensorsHeader parse_safetensors_header(std::string_view json, int64_t data_bytes, std::string_view where);

/// The size of a tensor. @returns false on 64-bit overflow, or if the bits do not fill whole bytes (`misaligned` tells).
[[nodiscard]] bool tensor_bytes(Dtype dtype, const std::vector<int64_t>& shape, int64_t& bytes, bool& misaligned);

}  // namespace qlorapp::format
