// SPDX-License-Identifier: Apache-2.0
#include "format/folder.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>

#include <dirent.h>
#include <fcntl.h>
#include <ftw.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/check.hpp"
#include "format/folder_lock.hpp"
#include "format/retry.hpp"

namespace qlorapp::format {
namespace {

mode_t kind_of(const std::string& path) {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0 ? status.st_mode & S_IFMT : 0;
}

int remove_entry(const char* entry, const struct stat*, int, FTW*) {
  return retrying([&] { return std::remove(entry); });
}

/// The mark of a FreshFolder: its lock's file.
constexpr std::string_view kUnfinished = ".qlorapp-unfinished";

}  // namespace

std::string path_in(std::string_view folder, std::string_view name) {
  return folder.empty() || folder.ends_with('/') ? message("{}{}", folder, name) : message("{}/{}", folder, name);
}

std::string file_name(std::string_view path) {
  path = path.substr(0, path.find_last_not_of('/') + 1);
  return std::string(path.substr(path.find_last_of('/') + 1));
}

std::string parent_of(const std::string& path) {
  const size_t last = path.find_last_not_of('/');
  const size_t slash = last == std::string::npos ? std::string::npos : path.find_last_of('/', last);
  if (slash == std::string::npos) return path.starts_with('/') ? "/" : ".";
  const size_t end = path.find_last_not_of('/', slash);
  return end == std::string::npos ? "/" : path.substr(0, end + 1);
}

bool exists(const std::string& path) { return kind_of(path) != 0; }
bool is_folder(const std::string& path) { return kind_of(path) == S_IFDIR; }
bool is_regular_file(const std::string& path) { return kind_of(path) == S_IFREG; }

bool is_same_file(const std::string& a, const std::string& b) {
  struct stat first {
  }, second{};
  return ::stat(a.c_str(), &first) == 0 && ::stat(b.c_str(), &second) == 0 && first.st_dev == second.st_dev &&
         first.st_ino == second.st_ino;
}

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  const std::unique_ptr<DIR, int (*)(DIR*)> stream(::opendir(folder.c_str()), ::closedir);
  if (!stream) return names;
  while (const dirent* entry = ::readdir(stream.get())) {
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

void make_folders(std::string_view where, const std::string& path) {
  if (is_folder(path)) return;
  const std::string parent = parent_of(path);
  if (parent != path && !exists(parent)) make_folders(where, parent);
  if (retrying([&] { return ::mkdir(path.c_str(), 0777); }) == 0 || (errno == EEXIST && is_folder(path))) return;
  const int error = errno;
  throw IoError(message("[{}] cannot make {}: {}. Name another folder.", where, path, std::strerror(error)), error);
}

void remove_folder(const std::string& path) { ::nftw(path.c_str(), remove_entry, 16, FTW_DEPTH | FTW_PHYS); }

void flush(const std::string& path) {
  const int descriptor = retrying([&] { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK); });
  const int error = descriptor < 0 || retrying([&] { return ::fsync(descriptor); }) != 0 ? errno : 0;
  if (descriptor >= 0) ::close(descriptor);
  // EINVAL and EROFS: a file system that needs no flush
  if (error != 0 && error != EINVAL && error != EROFS)
    throw IoError(message("[output] {} cannot be flushed to the disk: {}.", path, std::strerror(error)), error);
}

void flush_tree(const std::string& folder) {
  for (const std::string& name : names_in(folder)) {
    const std::string path = path_in(folder, name);
    is_folder(path) ? flush_tree(path) : flush(path);
  }
  flush(folder);
}

void check_output_folder(const std::string& folder) {
  QLORAPP_CHECK_VALUE(!exists(folder) || is_folder(folder), "[output] {} is a file, not a folder. Name another.", folder);
  struct stat link {};
  QLORAPP_CHECK_VALUE(exists(folder) || ::lstat(folder.c_str(), &link) != 0,
                      "[output] {} is a link to a folder that does not exist. Make that folder, or name another.", folder);
  // The nearest folder that is there already is the one that has to let us in.
  std::string place = folder;
  while (!exists(place) && place != "/" && place != ".") place = parent_of(place);
  const int refused = !is_folder(place) ? ENOTDIR : ::access(place.c_str(), W_OK | X_OK) != 0 ? errno : 0;
  if (refused == 0) return;
  throw IoError(message("[output] cannot write to {}: {}: {}. Name another folder.", folder, place, std::strerror(refused)),
                refused);
}

FreshFolder::FreshFolder(std::string folder) : folder_(std::move(folder)) {
  check_output_folder(folder_);
  existed_ = exists(folder_);
  const auto check_empty = [&](bool may_be_left) {
    const auto names = names_in(folder_);
    const bool is_left = may_be_left && std::find(names.begin(), names.end(), kUnfinished) != names.end();
    const bool is_empty = names.empty() || (names.size() == 1 && names.front() == kUnfinished);
    QLORAPP_CHECK_VALUE(is_empty || is_left, "[output] {} must be new or empty; it is not. Name another folder.", folder_);
  };
  check_empty(true);
  unfinished_ = std::make_unique<FolderLock>(folder_, kUnfinished);
  check_empty(unfinished_->was_left());  // another program may have finished it meanwhile
  for (const std::string& name : names_in(folder_)) {
    if (name != kUnfinished) remove_folder(path_in(folder_, name));
  }
}

void FreshFolder::keep() {
  unfinished_->remove_file();
  kept_ = true;
}

FreshFolder::~FreshFolder() {
  if (!kept_) {
    for (const std::string& name : names_in(folder_)) {
      if (name != kUnfinished) remove_folder(path_in(folder_, name));
    }
  }
  unfinished_.reset();
  if (!kept_ && !existed_) ::rmdir(folder_.c_str());
}

}  // namespace qlorapp::format
