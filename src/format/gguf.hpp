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
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "files/atomic_file.hpp"
#include "files/file_reader.hpp"

namespace qlorapp::format {

/// How a tensor's elements are stored: numbers of ggml.
enum class GgufType : uint32_t {
  kF32 = 0,
  kF16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kBF16 = 30
};

/// Elements that are stored together, along a row.
struct GgufBlock {
  GgufType type;
  std::string_view name;  ///< ggml's: "Q8_0".
  int64_t elements, bytes;
};
[[nodiscard]] const GgufBlock& block_of(GgufType type);
/// By ggml's number; null for one that is not computed here.
[[nodiscard]] const GgufBlock* find_block(uint32_t number);

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

/// A tensor and its place in a file.
struct GgufEntry : GgufTensor {
  int64_t offset = 0;  ///< Of its first byte, from the start of the file.
};

/// An open file whose every byte before the tensors was checked; tensors are read when asked for. Reading is const and thread-safe.
///
/// Rules, each with a message that names the byte: version 2 or 3 · at most 65,536 keys and tensors · keys of 1 to 255 bytes, tensors' names of
/// at most 63, all UTF-8 and none twice · known types of values, arrays of numbers, truths or strings and none of arrays · 1 to 4 extents from
/// 1 on · rows of whole blocks · offsets at multiples of general.alignment, within the file and without overlap. Nothing is allocated for a
/// count before the file is seen to be that long.
class GgufFile {
 public:
  /// The value of a key. Integers of any width become int64; booleans become 0 or 1.
  using Value = std::variant<int64_t, double, std::string, std::vector<int64_t>, std::vector<double>, std::vector<std::string>>;

  /// @throws IoError, FormatError naming file, byte and rule.
  explicit GgufFile(const std::string& path);

  [[nodiscard]] const std::string& path() const noexcept { return reader_.path(); }
  /// Sorted by name.
  [[nodiscard]] const std::vector<GgufEntry>& tensors() const noexcept { return tensors_; }
  /// @returns the tensor of that name, or nullptr.
  [[nodiscard]] const GgufEntry* find(std::string_view name) const;

  /// A key's value as this type, or nothing where the key is missing. @throws FormatError naming the key for another type.
  template <class T>
  [[nodiscard]] std::optional<T> get(const std::string& key) const {
    const auto found = metadata_.find(key);
    if (found == metadata_.end()) return std::nullopt;
    if constexpr (std::is_same_v<T, double>) {
      if (const auto* whole = std::get_if<int64_t>(&found->second)) return static_cast<double>(*whole);
    }
    if (const T* value = std::get_if<T>(&found->second)) return *value;
    refuse_type(key);
  }
  /// @throws FormatError if it is missing, too.
  template <class T>
  [[nodiscard]] T require(const std::string& key) const {
    if (auto value = get<T>(key)) return *std::move(value);
    refuse_missing(key);
  }

  /// Reads into.size() bytes of a tensor, from its byte `offset` on. @throws ValueError, FormatError, IoError as FileReader::read_at.
  void read(const GgufEntry& tensor, int64_t offset, std::span<std::byte> into) const;
  /// @throws FormatError if the file is not as it was when it was opened.
  void check_unchanged() const { reader_.check_unchanged(); }

 private:
  [[noreturn]] void refuse_type(const std::string& key) const;
  [[noreturn]] void refuse_missing(const std::string& key) const;

  files::FileReader reader_;
  std::map<std::string, Value> metadata_;
  std::vector<GgufEntry> tensors_;
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
