// SPDX-License-Identifier: Apache-2.0
/// Files that take their places in a folder together: after a crash at any moment the folder holds all the old ones or, once
/// finish_update() was called, all the new ones.
///
///     write      into .qlorapp-update-<random> in the folder, which is locked
///     commit     the names of the files are written beside them, all is flushed, and the whole is renamed to .qlorapp-pending: from here
///                on the update will be finished
///     apply      a guard that differs is removed, so that other programs see an incomplete folder and not a mixture; files are renamed into
///                their places, guards last; .qlorapp-pending goes
///
/// A folder may come from a stranger. Only the named files are moved, from the folder into the folder, and no link is followed on the way.
///
/// Source: redo logging; rename(2) is atomic within a file system.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace qlorapp::files {

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
  /// The new files, relative to the folder.
  [[nodiscard]] std::vector<std::string> files() const;
  /// Removes this file of the folder with commit(), if an earlier update put it there (the folder's manifest names it). Before seal().
  void retire(const std::string& name);
  /// Adds the new files to the folder's manifest (manifest.hpp), which is one of them then. commit() does it where it was not called.
  /// @throws IoError.
  void seal();
  /// Flushes the new files and puts them into their places. Others in the folder stay, but for those of retire(). @throws IoError.
  void commit();
  /// The new files vanish. After commit() it does nothing.
  void discard() noexcept;

 private:
  std::string folder_, guard_, staging_;
  std::vector<std::string> retired_;
  bool sealed_ = false;
  int lock_ = -1;  ///< Of the staging folder: tells a live update from one that was left.
};

/// Puts the files of an interrupted update into their places; without one it does nothing. Readers of such folders call it first.
/// An update is dropped, with a warning, if one of its files was saved anew since.
/// @throws IoError if the system refuses; FormatError if the update is none of this library's.
void finish_update(const std::string& folder, std::string_view guard);

/// Removes an interrupted update. Files of it that have taken their places stay.
void drop_update(const std::string& folder);

}  // namespace qlorapp::files
