// SPDX-License-Identifier: Apache-2.0
/// One program at a time writes into a folder: flock(2) on a file in it, which the system releases when the program ends, however it does.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace qlorapp::files {

class FolderLock {
 public:
  /// Makes the folder if it is missing. A file that a dead program left is taken over.
  /// @param name  of the file; other names are other locks.
  /// @throws IoError (EWOULDBLOCK) naming host and process of the program that holds the lock; IoError if the file cannot be made.
  explicit FolderLock(const std::string& folder, std::string_view name = ".qlorapp.lock");
  /// Removes the file, and the folder if it was made here and nothing is in it.
  ~FolderLock();
  /// Returns whether the folder still contains this file, neither removed nor replaced.
  [[nodiscard]] bool is_there() const;
  /// Removes the file now, and makes that durable. @throws IoError: the lock is still held.
  void remove_file();
  /// A program that held the lock ended without removing its file: what it wrote may be unfinished.
  [[nodiscard]] bool was_left() const { return !left_.empty(); }
  /// What that program wrote into the file: a line about itself, and the names of note().
  [[nodiscard]] const std::string& left() const { return left_; }
  /// Adds names to the file, durably: name_list(), behind the line. @throws IoError.
  void note(const std::vector<std::string>& names);
  [[nodiscard]] const std::vector<std::string>& noted() const { return noted_; }
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  std::string folder_, path_;
  int descriptor_ = -1;
  bool made_folder_ = false;
  std::string left_;
  std::vector<std::string> noted_;
};

}  // namespace qlorapp::files
