// SPDX-License-Identifier: Apache-2.0
/// One program at a time writes into a folder: flock(2) on a file in it, which the system releases when the program ends, however it does.
#pragma once

#include <string>
#include <string_view>

namespace qlorapp::format {

class FolderLock {
 public:
  /// Makes the folder if it is missing. A file that a dead program left is taken over.
  /// @param name  of the file; other names are other locks.
  /// @throws IoError (EWOULDBLOCK) naming host and process of the program that holds the lock; IoError if the file cannot be made.
  explicit FolderLock(const std::string& folder, std::string_view name = ".qlorapp.lock");
  /// Removes the file, and the folder if it was made here and nothing is in it.
  ~FolderLock();
  /// Removes the file now, and makes that durable. @throws IoError: the lock is still held.
  void remove_file();
  /// A program that held the lock ended without removing its file: what it wrote may be unfinished.
  [[nodiscard]] bool was_left() const { return was_left_; }
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  std::string folder_, path_;
  int descriptor_ = -1;
  bool was_left_ = false, made_folder_ = false;
};

}  // namespace qlorapp::format
