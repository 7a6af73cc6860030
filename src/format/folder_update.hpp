// SPDX-License-Identifier: Apache-2.0
/// Files that take their places in a folder together: after a crash at any moment the folder holds all the old ones or, once
/// finish_update() was called, all the new ones.
///
///     write      into .qlorapp-update-<process> in the folder, flushed
///     commit     rename of that to .qlorapp-pending: from here on the update will be finished
///     apply      a guard that differs is removed, so that other programs see an incomplete folder and not a mixture; files are renamed into
///                their places, guards last; .qlorapp-pending goes
///
/// Source: redo logging; rename(2) is atomic within a file system.
#pragma once

#include <string>
#include <string_view>

namespace qlorapp::format {

class FolderUpdate {
 public:
  /// Makes the folder if it is missing, finishes an update that was interrupted, and removes what others have left unfinished.
  /// @param guard  file without which a reader refuses the folder, such as "adapter_config.json", in any folder of the update.
  /// @throws IoError.
  FolderUpdate(std::string folder, std::string guard);
  ~FolderUpdate() { discard(); }
  FolderUpdate(const FolderUpdate&) = delete;
  FolderUpdate& operator=(const FolderUpdate&) = delete;

  /// Where to write the new files, and folders of them.
  [[nodiscard]] const std::string& staging() const { return staging_; }
  /// Flushes the new files and puts them into their places. Others in the folder stay. @throws IoError.
  void commit();
  /// The new files vanish. After commit() it does nothing.
  void discard();

 private:
  std::string folder_, guard_, staging_;
};

/// Puts the files of an interrupted update into their places; without one it does nothing. Readers of such folders call it first.
/// @throws IoError if the system refuses.
void finish_update(const std::string& folder, std::string_view guard);

}  // namespace qlorapp::format
