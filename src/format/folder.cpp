// SPDX-License-Identifier: Apache-2.0
#include "format/folder.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>

#include <dirent.h>
#include <ftw.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/check.hpp"

namespace qlorapp::format {
namespace {

mode_t kind_of(const std::string& path) {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0 ? status.st_mode & S_IFMT : 0;
}

int remove_entry(const char* entry, const struct stat*, int, FTW*) { return std::remove(entry); }
int remove_entry_inside(const char* entry, const struct stat*, int, FTW* place) {
  return place->level == 0 ? 0 : std::remove(entry);
}

std::string parent_of(const std::string& path) {
  const size_t last = path.find_last_not_of('/');
  const size_t slash = last == std::string::npos ? std::string::npos : path.find_last_of('/', last);
  if (slash == std::string::npos) return path.starts_with('/') ? "/" : ".";
  const size_t end = path.find_last_not_of('/', slash);
  return end == std::string::npos ? "/" : path.substr(0, end + 1);
}

}  // namespace

std::string path_in(std::string_view folder, std::string_view name) {
  return folder.empty() || folder.ends_with('/') ? message("{}{}", folder, name) : message("{}/{}", folder, name);
}

std::string file_name(std::string_view path) { return std::string(path.substr(path.find_last_of('/') + 1)); }

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
  if (::mkdir(path.c_str(), 0777) == 0 || (errno == EEXIST && is_folder(path))) return;
  const int error = errno;
  throw IoError(message("[{}] cannot make {}: {}. Name another folder.", where, path, std::strerror(error)), error);
}

void remove_folder(const std::string& path) { ::nftw(path.c_str(), remove_entry, 16, FTW_DEPTH | FTW_PHYS); }

void check_output_folder(const std::string& folder) {
  QLORAPP_CHECK_VALUE(!exists(folder) || is_folder(folder), "[output] {} is a file, not a folder. Name another.", folder);
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
  QLORAPP_CHECK_VALUE(names_in(folder_).empty(), "[output] {} must be new or empty; it is not. Name another folder.", folder_);
}

FreshFolder::~FreshFolder() {
  if (kept_) return;
  ::nftw(folder_.c_str(), remove_entry_inside, 16, FTW_DEPTH | FTW_PHYS);
  if (!existed_) ::rmdir(folder_.c_str());
}

}  // namespace qlorapp::format
