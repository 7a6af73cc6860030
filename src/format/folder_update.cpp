// SPDX-License-Identifier: Apache-2.0
#include "format/folder_update.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "format/file_reader.hpp"
#include "format/folder.hpp"
#include "format/retry.hpp"
#include "qlorapp/core/log.hpp"

namespace qlorapp::format {
namespace {

constexpr std::string_view kPending = ".qlorapp-pending";
constexpr std::string_view kStaging = ".qlorapp-update-";
constexpr int64_t kMostCompared = int64_t{1} << 20;  // a guard is a small file

[[noreturn]] void cannot_write(const std::string& path, int error) {
  throw IoError(
      message("[output] cannot write {}: {}. Check the path, its permissions and the free space.", path, std::strerror(error)),
      error);
}

bool is_pending(const std::string& path) {
  struct stat status {};
  return ::lstat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
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

void rename_over(const std::string& from, const std::string& to) {
  // ENOENT: another process finishes the same update
  if (retrying([&] { return std::rename(from.c_str(), to.c_str()); }) != 0 && errno != ENOENT) cannot_write(to, errno);
}

/// Files and folders below a folder, relative to it: folders before what is in them.
void list(const std::string& root, const std::string& prefix, std::vector<std::string>& folders, std::vector<std::string>& files) {
  for (const std::string& entry : names_in(path_in(root, prefix))) {
    const std::string name = prefix + entry;
    if (is_folder(path_in(root, name))) {
      folders.push_back(name);
      list(root, name + "/", folders, files);
    } else {
      files.push_back(name);
    }
  }
}

void apply(const std::string& pending, const std::string& folder, std::string_view guard) {
  std::vector<std::string> folders, files;
  list(pending, "", folders, files);
  for (const std::string& name : folders) make_folders("output", path_in(folder, name));
  std::stable_partition(files.begin(), files.end(), [&](const std::string& name) { return file_name(name) != guard; });
  bool hides = false;
  for (const std::string& name : files) {
    const std::string there = path_in(folder, name);
    if (file_name(name) != guard || !exists(there) || is_equal(there, path_in(pending, name))) continue;
    if (retrying([&] { return ::unlink(there.c_str()); }) != 0 && errno != ENOENT) cannot_write(there, errno);
    hides = true;
  }
  if (hides) {
    flush(folder);
    for (const std::string& name : folders) flush(path_in(folder, name));
  }
  for (const std::string& name : files) rename_over(path_in(pending, name), path_in(folder, name));
  for (const std::string& name : folders) flush(path_in(folder, name));
  flush(folder);
  remove_folder(pending);
}

/// Unfinished updates of processes that are gone.
void remove_left_updates(const std::string& folder) {
  for (const std::string& name : names_in(folder)) {
    if (!name.starts_with(kStaging)) continue;
    int process = 0;
    const char* const digits = name.data() + kStaging.size();
    if (std::from_chars(digits, name.data() + name.size(), process).ec != std::errc{} || process <= 0) continue;
    if (process != ::getpid() && ::kill(process, 0) != 0 && errno == ESRCH) remove_folder(path_in(folder, name));
  }
}

}  // namespace

FolderUpdate::FolderUpdate(std::string folder, std::string guard) : folder_(std::move(folder)), guard_(std::move(guard)) {
  make_folders("output", folder_);
  finish_update(folder_, guard_);
  remove_left_updates(folder_);
  staging_ = path_in(folder_, message("{}{}", kStaging, static_cast<int64_t>(::getpid())));
  remove_folder(staging_);
  if (retrying([&] { return ::mkdir(staging_.c_str(), 0777); }) != 0) cannot_write(staging_, errno);
}

void FolderUpdate::discard() {
  if (!staging_.empty()) remove_folder(std::exchange(staging_, {}));
}

void FolderUpdate::commit() {
  flush_tree(staging_);
  const Moving moving(folder_);
  const std::string pending = path_in(folder_, kPending);
  if (retrying([&] { return std::rename(staging_.c_str(), pending.c_str()); }) != 0) cannot_write(pending, errno);
  staging_.clear();
  flush(folder_);
  apply(pending, folder_, guard_);
}

void finish_update(const std::string& folder, std::string_view guard) {
  const std::string pending = path_in(folder, kPending);
  if (!is_pending(pending)) return;
  const Moving moving(folder);
  if (!is_pending(pending)) return;  // another process was first
  log_info(message("[output] {}: files of an interrupted save take their places.", folder));
  apply(pending, folder, guard);
}

}  // namespace qlorapp::format
