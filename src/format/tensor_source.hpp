// SPDX-License-Identifier: Apache-2.0
/// A file that holds named tensors, whatever its format.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "qlorapp/format/dtype.hpp"

namespace qlorapp::format {

/// A tensor and its place in a file.
struct TensorEntry {
  std::string name;
  Dtype dtype = Dtype::kF32;
  std::vector<int64_t> shape;
  int64_t offset = 0;  ///< Of its first byte, from the start of the file; a number of the source's own where it makes the bytes.
  int64_t nbytes = 0;

  /// Product of the shape; 1 for a scalar.
  [[nodiscard]] int64_t numel() const;
};

/// Reading is const and thread-safe.
class TensorSource {
 public:
  TensorSource() = default;
  virtual ~TensorSource() = default;
  TensorSource(const TensorSource&) = delete;
  TensorSource& operator=(const TensorSource&) = delete;

  [[nodiscard]] virtual const std::string& path() const noexcept = 0;
  /// In the order of their bytes in the file.
  [[nodiscard]] virtual const std::vector<TensorEntry>& tensors() const noexcept = 0;
  /// Reads into.size() bytes of a tensor, from its byte `offset` on.
  /// @throws ValueError if the range is not within the tensor; FormatError if the file has become shorter.
  virtual void read(const TensorEntry& tensor, int64_t offset, std::span<std::byte> into) const = 0;
  /// @throws FormatError if the file is not as it was when it was opened.
  virtual void check_unchanged() const = 0;

 protected:
  TensorSource(TensorSource&&) = default;
  TensorSource& operator=(TensorSource&&) = default;
};

}  // namespace qlorapp::format
