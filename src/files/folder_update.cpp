// SPDX-License-Identifier: Apache-2.0
#include "files/folder_update.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "core/printable.hpp"
#include "files/atomic_file.hpp"
#include "files/file_reader.hpp"
#include "files/folder.hpp"
#include "files/manifest.hpp"
#include "files/retry.hpp"
#include "qlorapp/core/log.hpp"

namespace qlorapp::files {
namespace {

constexpr std::string_view kPending = ".qlorapp-pending";
constexpr std::string_view kFiles = ".qlorapp-files";  // the names of an update's files; written last
constexpr int64_t kMostCompared = int64_t{1} << 20;    // a guard is a small file
constexpr int64_t kMostNames = int64_t{1} << 20;       // bytes
constexpr size_t kMostFoldersDeep = 4;

[[noreturn]] void cannot_write(const std::string& path, int error) {
  throw IoError(
      message("[output] cannot write {}: {}. Check the path, its permissions and the free space.", path, std::strerror(error)),
      error);
}

std::optional<struct stat> status_of(const std::string& path) {
  struct stat status {};
  return ::lstat(path.c_str(), &status) == 0 ? std::optional(status) : std::nullopt;
}

bool is_later(const timespec& a, const timespec& b) { return std::pair(a.tv_sec, a.tv_nsec) > std::pair(b.tv_sec, b.tv_nsec); }

/// The list of an update must not look older than its files, which a clock may do that was set back while they were written.
void make_latest(const std::string& list, const std::string& folder, const std::vector<std::string>& files) {
  timespec latest = status_of(list).value().st_mtim;
  for (const std::string& name : files) {
    if (const auto file = status_of(path_in(folder, name)); file && is_later(file->st_mtim, latest)) latest = file->st_mtim;
  }
  const timespec times[2] = {latest, latest};
  if (::utimensat(AT_FDCWD, list.c_str(), times, AT_SYMLINK_NOFOLLOW) != 0) cannot_write(list, errno);
}

bool is_real_folder(const std::string& path) {
  const auto status = status_of(path);
  return status && S_ISDIR(status->st_mode);
}

int locked(const std::string& folder, int operation) {
  const int descriptor = retrying([&] { return ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW); });
  if (descriptor < 0 || retrying([&] { return ::flock(descriptor, operation); }) == 0 || errno != EWOULDBLOCK) return descriptor;
  ::close(descriptor);
  return -1;
}

/// Only one process at a time moves the files of an update. Waits; on a file system without locks it does nothing.
class Moving {
 public:
  explicit Moving(const std::string& folder)
      : descriptor_(retrying([&] { return ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); })) {
    if (descriptor_ >= 0) (void)retrying([&] { return ::flock(descriptor_, LOCK_EX); });
  }
  ~Moving() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  Moving(const Moving&) = delete;
  Moving& operator=(const Moving&) = delete;

 private:
  int descriptor_;
};

bool is_equal(const std::string& a, const std::string& b) {
  const FileReader first(a), second(b);
  return first.size() == second.size() && first.size() <= kMostCompared &&
         first.read_all(kMostCompared) == second.read_all(kMostCompared);
}

/// Files below a folder, relative to it.
void list(const std::string& root, const std::string& prefix, size_t depth, std::vector<std::string>& files) {
  QLORAPP_CHECK_VALUE(depth <= kMostFoldersDeep, "[output] folders may lie at most {} deep in {}.", kMostFoldersDeep, root);
  for (const std::string& entry : names_in(path_in(root, prefix))) {
    const std::string name = prefix + entry;
    is_real_folder(path_in(root, name)) ? list(root, name + "/", depth + 1, files) : files.push_back(name);
  }
}

/// An update that was committed and is not finished.
class Pending {
 public:
  /// @throws FormatError unless this library wrote it.
  explicit Pending(const std::string& folder) : folder_(folder), path_(path_in(folder, kPending)) {
    const std::string names = path_in(path_, kFiles);
    QLORAPP_CHECK_FORMAT(is_plain_file(path_, std::string(kFiles)),
                         "[output] {} is no unfinished save of this library: it has no {}. Remove it.", path_, kFiles);
    const std::string text = FileReader(names).read_all(kMostNames);
    files_ = names_of_list(text);
    for (const std::string& name : files_) check(name);
    committed_ = status_of(names)->st_mtim;
  }

  [[nodiscard]] const std::vector<std::string>& files() const { return files_; }
  [[nodiscard]] std::string from(const std::string& name) const { return path_in(path_, name); }
  [[nodiscard]] std::string to(const std::string& name) const { return path_in(folder_, name); }

  /// A file that another program saved after this update was committed. Empty: none.
  [[nodiscard]] std::string saved_since() const {
    for (const std::string& name : files_) {
      const auto there = status_of(to(name));
      if (there && is_later(there->st_mtim, committed_)) return name;
    }
    return "";
  }

  void apply(std::string_view guard) const {
    std::vector<std::string> folders, files = files_;
    for (const std::string& name : files) {
      for (size_t slash = name.find('/'); slash != std::string::npos; slash = name.find('/', slash + 1)) {
        folders.push_back(to(name.substr(0, slash)));
        make_folders("output", folders.back());
      }
    }
    std::stable_partition(files.begin(), files.end(), [&](const std::string& name) { return file_name(name) != guard; });
    bool hides = false;
    for (const std::string& name : files) {
      if (file_name(name) != guard || !exists(to(name)) || !exists(from(name)) || is_equal(to(name), from(name))) continue;
      if (retrying([&] { return ::unlink(to(name).c_str()); }) != 0 && errno != ENOENT) cannot_write(to(name), errno);
      hides = true;
    }
    if (hides) flush_all(folders);
    for (const std::string& name : files) {
      // ENOENT: it is in its place already
      if (retrying([&] { return std::rename(from(name).c_str(), to(name).c_str()); }) != 0 && errno != ENOENT)
        cannot_write(to(name), errno);
    }
    flush_all(folders);
    remove_folder(path_);
  }

  void remove() const { remove_folder(path_); }

 private:
  void check(const std::string& name) const {
    QLORAPP_CHECK_FORMAT(is_name_inside(name), "[output] {}: {} must be the path of a file inside the folder. Remove {}.",
                         path_in(path_, kFiles), printable(name), path_);
    for (size_t slash = name.find('/'); slash != std::string::npos; slash = name.find('/', slash + 1)) {
      for (const std::string& part : {from(name.substr(0, slash)), to(name.substr(0, slash))}) {
        const auto status = status_of(part);
        QLORAPP_CHECK_FORMAT(!status || S_ISDIR(status->st_mode), "[output] {} must be a folder, not a link or a file. Remove it.",
                             part);
      }
    }
    for (const std::string& path : {from(name), to(name)}) {
      const auto status = status_of(path);
      QLORAPP_CHECK_FORMAT(!status || S_ISREG(status->st_mode) || (S_ISLNK(status->st_mode) && path == to(name)),
                           "[output] {} must be a regular file. Remove it.", path);
    }
  }
  void flush_all(const std::vector<std::string>& folders) const {
    for (const std::string& folder : folders) flush(folder);
    flush(folder_);
  }

  std::string folder_, path_;
  std::vector<std::string> files_;
  timespec committed_{};
};

/// All of an update is in place, and removing its folder was interrupted.
bool is_emptied(const std::string& pending) {
  std::vector<std::string> files;
  list(pending, "", 1, files);
  return files.empty();
}

/// Unfinished updates of processes that are gone: nobody holds their locks.
void remove_left_updates(const std::string& folder) {
  for (const std::string& name : names_in(folder)) {
    const std::string path = path_in(folder, name);
    if (!name.starts_with(kUpdatePrefix) || !is_real_folder(path)) continue;
    const int lock = locked(path, LOCK_EX | LOCK_NB);
    if (lock < 0) continue;
    remove_folder(path);
    ::close(lock);
  }
}

}  // namespace

FolderUpdate::FolderUpdate(std::string folder, std::string guard) : folder_(std::move(folder)), guard_(std::move(guard)) {
  make_folders("output", folder_);
  finish_update(folder_, guard_);
  const Moving moving(folder_);  // so that no other removes the new one before it is locked
  remove_left_updates(folder_);
  for (std::random_device random;;) {
    staging_ = path_in(folder_, message("{}{:08x}", kUpdatePrefix, random()));
    if (retrying([&] { return ::mkdir(staging_.c_str(), 0777); }) == 0) break;
    if (errno != EEXIST) cannot_write(std::exchange(staging_, {}), errno);
  }
  lock_ = locked(staging_, LOCK_EX | LOCK_NB);
}

void FolderUpdate::discard() noexcept {
  if (!staging_.empty()) remove_folder(std::exchange(staging_, {}));
  if (lock_ >= 0) ::close(std::exchange(lock_, -1));
}

std::vector<std::string> FolderUpdate::files() const {
  std::vector<std::string> files;
  list(staging_, "", 1, files);
  return files;
}

void FolderUpdate::retire(const std::string& name) {
  if (!has_entry(folder_, kManifestName)) return;
  try {
    const Manifest manifest = read_manifest(folder_);
    const auto is_it = [&](const ManifestFile& file) { return file.name == name; };
    const bool is_own = manifest.kind == kOutputKind && std::any_of(manifest.files.begin(), manifest.files.end(), is_it);
    if (is_own && is_plain_file(folder_, name)) retired_.push_back(name);
  } catch (const FormatError&) {}  // a damaged manifest names nothing
}

void FolderUpdate::seal() {
  sealed_ = true;
  if (const auto manifest = output_manifest(folder_, staging_, files(), retired_))
    write_file_atomically(path_in(staging_, kManifestName), *manifest);
}

void FolderUpdate::commit() {
  if (!sealed_) seal();
  const std::vector<std::string> written = files();
  const std::string list = path_in(staging_, kFiles);
  write_file_atomically(list, name_list(written));
  make_latest(list, staging_, written);
  flush_tree(staging_);
  const Moving moving(folder_);
  const std::string pending = path_in(folder_, kPending);
  if (retrying([&] { return std::rename(staging_.c_str(), pending.c_str()); }) != 0) cannot_write(pending, errno);
  staging_.clear();
  flush(folder_);
  Pending(folder_).apply(guard_);
  for (const std::string& name : std::exchange(retired_, {})) {
    const std::string path = path_in(folder_, name);
    if (retrying([&] { return ::unlink(path.c_str()); }) != 0 && errno != ENOENT) cannot_write(path, errno);
  }
  discard();
}

void finish_update(const std::string& folder, std::string_view guard) {
  const std::string path = path_in(folder, kPending);
  if (!is_real_folder(path)) return;
  const Moving moving(folder);
  if (!is_real_folder(path)) return;  // another process was first
  if (is_emptied(path)) return remove_folder(path);
  const Pending pending(folder);
  if (const std::string name = pending.saved_since(); !name.empty()) {
    log_warning(message("[output] {}: an interrupted save is dropped, as '{}' was saved anew since.", folder, name));
    pending.remove();
    return;
  }
  log_info(message("[output] {}: files of an interrupted save take their places.", folder));
  pending.apply(guard);
}

void drop_update(const std::string& folder) {
  const Moving moving(folder);
  remove_folder(path_in(folder, kPending));
}

}  // namespace qlorapp::files
