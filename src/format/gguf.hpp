// SPDX-License-Identifier: Apache-2.0
/// GGUF, the file of llama.cpp and its users: metadata and tensors in one file, weights in blocks. Torch-free.
///
///     "GGUF", version 3, number of tensors, number of keys         little-endian, counts in 64 bits
///     each key: name, type of the value, value                     a string is its length and bytes
///     each tensor: name, extents (the innermost first), type, offset
///     zeros up to a multiple of 32, then the tensors' bytes, each from a multiple of 32 on
///
/// Source: ggml's page about GGUF, and gguf 0.19's reader.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "files/atomic_file.hpp"

namespace qlorapp::format {

/// How a tensor's elements are stored: numbers of ggml.
enum class GgufType : uint32_t { kF32 = 0, kF16 = 1, kQ4_0 = 2, kQ8_0 = 8, kQ4_K = 12, kQ5_K = 13, kQ6_K = 14, kBF16 = 30 };

/// Elements that are stored together, along a row.
struct GgufBlock {
  GgufType type;
  std::string_view name;  ///< ggml's: "Q8_0".
  int64_t elements, bytes;
};
[[nodiscard]] const GgufBlock& block_of(GgufType type);

using GgufValue = std::variant<uint32_t, float, bool, std::string, std::vector<std::string>, std::vector<int32_t>,
                               std::vector<float>, std::vector<bool>>;
/// In the order of the file.
using GgufMetadata = std::vector<std::pair<std::string, GgufValue>>;

struct GgufTensor {
  std::string name;
  std::vector<int64_t> shape;  ///< Rows first, as torch has it.
  GgufType type = GgufType::kF32;

  [[nodiscard]] int64_t nbytes() const;
};

/// Writes a file tensor by tensor, holding none of them. The file appears, whole, with finish().
class GgufWriter {
 public:
  /// Writes everything before the tensors' bytes, and claims the room on the disk.
  /// @throws ValueError for a tensor whose rows are no whole number of blocks, or a name that appears twice; IoError.
  GgufWriter(const std::string& path, const GgufMetadata& metadata, std::vector<GgufTensor> tensors);

  /// In the order in which their bytes are to be written.
  [[nodiscard]] const std::vector<GgufTensor>& tensors() const noexcept { return tensors_; }
  /// Appends to the tensor that is under way. @throws ValueError past its end; IoError.
  void write(std::span<const std::byte> bytes);
  /// Flushes and renames. @throws ValueError if bytes are missing; IoError.
  void finish();

 private:
  void pad();

  std::vector<GgufTensor> tensors_;
  size_t current_ = 0;
  int64_t left_ = 0;  ///< Bytes of the current tensor.
  int64_t written_ = 0;
  files::AtomicFile file_;
};

}  // namespace qlorapp::format
