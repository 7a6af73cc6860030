// SPDX-License-Identifier: Apache-2.0
/// A folder in TMPDIR for as long as the program needs it.
#pragma once

#include <string>
#include <string_view>

#include <sys/types.h>

namespace qlorapp::files {

/// Of this user alone; goes with the object. One that a killed program left goes when the next program makes one: the lock on it
/// (flock(2)) is free. Of a forked process it is the parent's.
class TemporaryFolder {
 public:
  /// @throws IoError "[where] …".
  explicit TemporaryFolder(std::string_view where);
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  std::string path_;
  int lock_ = -1;  ///< Of the folder itself.
  pid_t owner_;
};

}  // namespace qlorapp::files
