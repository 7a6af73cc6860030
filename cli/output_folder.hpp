// SPDX-License-Identifier: Apache-2.0
/// The folder that a command writes into: looked at before the work begins, emptied again when the work fails.
#pragma once

#include <string>

namespace qlorapp::cli {

/// Makes sure that `folder` is one, or can be made, and can be written into; leaves nothing behind.
/// @throws ValueError for a file in its place; IoError if the system refuses.
void check_output_folder(const std::string& folder);

/// A new or empty folder that a command fills. Unless keep() is called, what was put into it goes with the object, and the
/// folder too if it was not there before: nothing half-written stays.
class FreshFolder {
 public:
  /// @throws as check_output_folder; ValueError if the folder is not empty.
  explicit FreshFolder(std::string folder);
  ~FreshFolder();
  FreshFolder(const FreshFolder&) = delete;
  FreshFolder& operator=(const FreshFolder&) = delete;
  void keep() { kept_ = true; }

 private:
  std::string folder_;
  bool existed_ = false, kept_ = false;
};

}  // namespace qlorapp::cli
