// SPDX-License-Identifier: Apache-2.0
/// Named tensors in one file, without code: the reader trusts nothing, the writer writes the reference library's bytes.
///
///     8 bytes   N, little-endian
///     N bytes   JSON: {"__metadata__": {string: string}, name: {"dtype", "shape", "data_offsets": [begin, end]}, …}
///     the rest  the tensors' bytes, row-major, little-endian; begin and end count from here
///
/// Rules, checked in this order with one message each: at least 8 bytes · N ≤ 100,000,000 · 8 + N within the file · UTF-8 ·
/// JSON, known dtypes, non-negative integers · ranges, sorted, cover the data without hole or overlap from byte 0 on · sizes do
/// not overflow · whole bytes · end - begin is the size of dtype and shape · the last range ends where the file ends (a
/// truncated file and a file with something behind it both fail here). Stricter than the reference: duplicate names and fields
/// and unknown fields are refused, and the counts below are bounded. Values are not looked at: NaN is a value.
///
/// Source: safetensors 0.8, README "Format" and its reference implementation's order of checks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "files/atomic_file.hpp"
#include "files/file_reader.hpp"
#include "format/tensor_source.hpp"
#include "qlorapp/format/dtype.hpp"

namespace qlorapp::format {

inline constexpr int64_t kMaxHeaderBytes = 100'000'000;
inline constexpr size_t kMaxTensors = 1'000'000;
inline constexpr size_t kMaxTensorNameBytes = 4096;
inline constexpr size_t kMaxTensorRank = 64;

/// A tensor before it has a place in a file.
struct TensorSpec {
  std::string name;
  Dtype dtype = Dtype::kF32;
  std::vector<int64_t> shape;
};

/// Strings about the file; safetensors of this field have {"format": "pt"}.
using Metadata = std::map<std::string, std::string>;

/// An open file whose header was checked; tensors are read when asked for. Reading is const and thread-safe.
class SafetensorsFile final : public TensorSource {
 public:
  /// @throws IoError, FormatError naming file, rule and tensor.
  explicit SafetensorsFile(const std::string& path);
  explicit SafetensorsFile(files::FileReader reader);

  [[nodiscard]] const std::string& path() const noexcept override { return reader_.path(); }
  [[nodiscard]] const std::vector<TensorEntry>& tensors() const noexcept override { return tensors_; }
  [[nodiscard]] const Metadata& metadata() const noexcept { return metadata_; }

  /// @returns the tensor of that name, or nullptr.
  [[nodiscard]] const TensorEntry* find(std::string_view name) const;
  /// @throws FormatError naming the file, with the nearest name it has.
  [[nodiscard]] const TensorEntry& at(std::string_view name) const;

  void read(const TensorEntry& tensor, int64_t offset, std::span<std::byte> into) const override;
  void read(std::string_view name, int64_t offset, std::span<std::byte> into) const { read(at(name), offset, into); }

  void check_unchanged() const override { reader_.check_unchanged(); }

 private:
  files::FileReader reader_;
  std::vector<TensorEntry> tensors_;
  std::vector<uint32_t> by_name_;  ///< Indices into tensors_, sorted by name.
  Metadata metadata_;
};

/// Writes a file tensor by tensor, holding none of them. The file appears, whole, with finish().
class SafetensorsWriter {
 public:
  /// Fixes the order, writes the header and claims the room on the disk.
  /// @throws ValueError for a duplicate or reserved name, a negative size, a size that is no whole number of bytes; IoError.
  SafetensorsWriter(const std::string& path, std::vector<TensorSpec> tensors, const Metadata& metadata = {});

  /// The tensors in the order in which their bytes are to be written.
  [[nodiscard]] const std::vector<TensorEntry>& tensors() const noexcept { return tensors_; }

  /// Appends to the data; pieces of any size. @throws ValueError past the end of the last tensor; IoError.
  void write(std::span<const std::byte> bytes);

  /// Flushes and renames. @throws ValueError if bytes are missing; IoError.
  void finish();

 private:
  std::vector<TensorEntry> tensors_;
  int64_t remaining_ = 0;
  files::AtomicFile file_;
};

/// Writes all tensors; `bytes_of` is asked for each one's bytes (its whole content) when its turn comes, and what it returned
/// must stay valid until it is asked for the next. @throws as SafetensorsWriter.
void write_safetensors(const std::string& path, std::vector<TensorSpec> tensors, const Metadata& metadata,
                       const std::function<std::span<const std::byte>(const TensorEntry&)>& bytes_of);

}  // namespace qlorapp::format
