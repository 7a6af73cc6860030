// SPDX-License-Identifier: Apache-2.0
/// Reads a file by position (pread), never by mapping it: a mapped page counts as memory of the process, and a mapped file
/// that is truncated meanwhile kills the process instead of raising an error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace qlorapp::files {

/// An open regular file. Movable. Reading is const and may be done from several threads.
class FileReader {
 public:
  /// @throws IoError naming the path, if it cannot be opened; FormatError if it is a folder, a pipe or a device.
  explicit FileReader(const std::string& path);

  /// Opens `name`, a plain file name, inside `folder` and nowhere else. A symbolic link is refused, except the one form in
  /// which the Hugging Face cache stores a snapshot: ../../blobs/<hex digits>, where a regular file must be.
  /// @throws IoError, FormatError as above; FormatError for a link that leads elsewhere.
  [[nodiscard]] static FileReader open_inside(const std::string& folder, const std::string& name);
  /// The same for the folder and the name that make a path.
  [[nodiscard]] static FileReader open_inside(const std::string& path);

  FileReader(FileReader&& other) noexcept;
  FileReader& operator=(FileReader&& other) noexcept;
  FileReader(const FileReader&) = delete;
  FileReader& operator=(const FileReader&) = delete;
  ~FileReader();

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  /// Bytes when it was opened.
  [[nodiscard]] int64_t size() const noexcept { return size_; }

  /// Fills `into` from byte `offset` on. Interrupted and short reads are continued.
  /// @throws FormatError if the file ends before, IoError if reading fails.
  void read_at(int64_t offset, std::span<std::byte> into) const;

  /// @throws FormatError if size or time of modification are not those of its opening: what was read may be of two files.
  void check_unchanged() const;

  /// The whole file. @throws FormatError if it is larger than `max_bytes`.
  [[nodiscard]] std::string read_all(size_t max_bytes) const;

 private:
  FileReader(int descriptor, std::string path);

  int descriptor_ = -1;
  int64_t size_ = 0;
  int64_t modified_ = 0;  ///< Nanoseconds since 1970.
  std::string path_;
};

}  // namespace qlorapp::files
