// SPDX-License-Identifier: Apache-2.0
/// Tensors in and out of safetensors files. Torch-free parsing is in format/; this is where bytes become tensors.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "format/safetensors.hpp"
#include "format/tensor_files.hpp"

namespace qlorapp {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// @throws FormatError naming the tensor, for a dtype that torch has no type for (sub-byte floats).
[[nodiscard]] at::ScalarType scalar_type_of(format::Dtype dtype, const std::string& tensor);
/// @throws TypeError for a type that safetensors has no name for.
[[nodiscard]] format::Dtype format_dtype_of(at::ScalarType type);

/// The memory of a contiguous tensor on the CPU.
[[nodiscard]] std::span<std::byte> bytes_of(const at::Tensor& tensor);

/// Reads one tensor into memory of its own on the CPU, in its file's dtype.
[[nodiscard]] at::Tensor read_tensor(const format::TensorSource& file, const format::TensorEntry& entry);
[[nodiscard]] inline at::Tensor read_tensor(const format::TensorLocation& location) {
  return read_tensor(*location.file, *location.tensor);
}

/// All tensors of a file.
[[nodiscard]] NamedTensors read_tensors(const std::string& path);

/// Writes through a temporary file and a rename. Tensors may be strided or on a device; each is copied to the CPU when its turn
/// comes. @throws IoError, ValueError for a name that stands twice.
void write_tensors(const std::string& path, const NamedTensors& tensors, const format::Metadata& metadata = {{"format", "pt"}});

}  // namespace qlorapp
