// SPDX-License-Identifier: Apache-2.0
/// The bytes of a data file in order, unpacked if it is a gzip file, with line numbers. Torch-free.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "gzip_reader.hpp"

namespace qlorapp {

class ByteStream {
 public:
  /// Opens the file and skips a UTF-8 byte order mark. @throws IoError, also for a pipe without a writer; FormatError for a
  /// damaged gzip file.
  explicit ByteStream(const std::string& path);
  ByteStream(const ByteStream&) = delete;
  ByteStream& operator=(const ByteStream&) = delete;

  /// @returns the next byte without taking it, or -1 at the end.
  [[nodiscard]] int peek();
  int take();
  /// Appends the text before the next line feed to `into`, and skips the line feed. @returns false at the end of the file.
  /// Stops as soon as `into` is longer than `limit`.
  bool take_line(std::string& into, std::size_t limit);
  /// Bytes that were read ahead: empty only at the end of the file.
  [[nodiscard]] std::string_view front();
  /// The line of the next byte, from 1.
  [[nodiscard]] int64_t line() const { return line_; }
  /// Its column in characters, from 1, counted from the last line feed or call of take_line().
  [[nodiscard]] int64_t column() const { return column_; }
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  struct Descriptor {
    int number = -1;
    ~Descriptor();
  };
  void await_writer();
  [[nodiscard]] std::size_t read_file(std::span<char> into);

  const std::string path_;
  Descriptor file_;
  std::string block_;
  std::size_t at_ = 0, size_ = 0;
  std::string packed_;  ///< Of a gzip file: the bytes that were read to recognize it, until they are unpacked.
  std::unique_ptr<GzipReader> gzip_;
  int64_t line_ = 1, column_ = 1;
};

}  // namespace qlorapp
