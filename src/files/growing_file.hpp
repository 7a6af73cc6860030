// SPDX-License-Identifier: Apache-2.0
/// A file that records are appended to. A record is there as a whole or not at all, except where power is lost or the file system fails while it
/// is written.
#pragma once

#include <string>
#include <string_view>

namespace qlorapp::files {

class GrowingFile {
 public:
  /// @param must_be_new  a file that exists is not touched. @throws IoError with path and errno.
  explicit GrowingFile(std::string path, bool must_be_new = false);
  /// Makes no file, for a caller that will make it much later. @throws IoError as the constructor with must_be_new would.
  static void check_new(const std::string& path);
  /// A file that nothing was appended to goes.
  ~GrowingFile();
  GrowingFile(const GrowingFile&) = delete;
  GrowingFile& operator=(const GrowingFile&) = delete;

  /// @throws IoError; then the file ends with the record before.
  void append(std::string_view record);
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  std::string path_;
  int descriptor_ = -1;
  bool is_empty_ = false;
};

}  // namespace qlorapp::files
