// SPDX-License-Identifier: Apache-2.0
/// Paths and folders: plain strings and POSIX calls.
///
/// Not std::filesystem: torch's wheels export the copy of it that belongs to the libstdc++ they were built with, and whichever the
/// loader meets first is called, with members that this one does not have (docs/adr/0008). tests/layers refuses its use in the library.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace qlorapp::files {

class FolderLock;
class FolderUpdate;

/// folder/name.
[[nodiscard]] std::string path_in(std::string_view folder, std::string_view name);
/// The folder that a path lies in: "." and "/" where it ends.
[[nodiscard]] std::string parent_of(const std::string& path);
/// The last part of a path, without slashes behind it.
[[nodiscard]] std::string file_name(std::string_view path);

[[nodiscard]] bool exists(const std::string& path);
[[nodiscard]] bool is_folder(const std::string& path);
[[nodiscard]] bool is_regular_file(const std::string& path);
/// A name in a folder, also that of a link to nothing.
[[nodiscard]] bool has_entry(const std::string& folder, std::string_view name);
/// The same file or folder under two names. False if either is missing.
[[nodiscard]] bool is_same_file(const std::string& a, const std::string& b);

/// The names in a folder without "." and "..", sorted; none if it does not exist. @throws IoError if it cannot be read: part of the names
/// must never count as all of them.
[[nodiscard]] std::vector<std::string> names_in(const std::string& folder);

/// Names in a file of ours: each ends with NUL, which no name contains. An older list has one on each line.
[[nodiscard]] std::string name_list(const std::vector<std::string>& names);
[[nodiscard]] std::vector<std::string> names_of_list(std::string_view text);

/// "a/b.json": parts that are plain names, so that the path stays inside a folder.
[[nodiscard]] bool is_name_inside(std::string_view name);
/// A regular file below the folder, with no link on the way. @param name  as is_name_inside() allows.
[[nodiscard]] bool is_plain_file(const std::string& folder, const std::string& name);

/// Makes a folder and those above it, durably; what is there is fine. @throws IoError "[where] cannot make …".
void make_folders(std::string_view where, const std::string& path);
/// Removes a folder and all in it, as far as that goes; links are removed, not followed; what is not there is fine.
void remove_folder(const std::string& path);

/// Makes a file, or the entries of a folder, durable. What needs no flush is fine. @throws IoError.
void flush(const std::string& path);
/// The same for a folder and all in it.
void flush_tree(const std::string& folder);

/// Names of folders that are filled, flushed as a tree, and then renamed; a number follows. What a killed program leaves in them is never
/// read.
inline constexpr std::string_view kUpdatePrefix = ".qlorapp-update-", kCheckpointPrefix = ".tmp-checkpoint-";
/// The folder is one of these or lies in one: files in it need no flush of their own.
[[nodiscard]] bool is_staging(std::string_view folder);

/// Makes sure that `folder` is one, or can be made, and can be written into; leaves nothing behind.
/// @throws ValueError for a file, or a link to nothing, in its place; IoError if the system refuses.
void check_output_folder(const std::string& folder);

/// A new or empty folder to fill. The files are written beside and appear in it together (folder_update.hpp). Unless keep() is called, they
/// go with the object, and the folder too if it was not there before. What a killed program left is removed by the next one; files that
/// it did not write stay, and are a reason to refuse.
class FreshFolder {
 public:
  /// @throws as check_output_folder; ValueError if the folder is not empty; IoError if another program fills it.
  explicit FreshFolder(std::string folder);
  ~FreshFolder();
  FreshFolder(const FreshFolder&) = delete;
  FreshFolder& operator=(const FreshFolder&) = delete;
  /// Where to write.
  [[nodiscard]] const std::string& path() const;
  /// All is written, and appears. @throws IoError.
  void keep();

 private:
  void remove_left() const;

  std::string folder_;
  bool existed_ = false, kept_ = false;
  std::unique_ptr<FolderLock> unfinished_;  ///< Its file is the mark of a folder that is not finished.
  std::unique_ptr<FolderUpdate> files_;
};

}  // namespace qlorapp::files
