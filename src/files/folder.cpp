// SPDX-License-Identifier: Apache-2.0
#include "files/folder.hpp"

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
#include "files/folder_lock.hpp"
#include "files/folder_update.hpp"
#include "files/retry.hpp"

namespace qlorapp::files {
namespace {

mode_t kind_of(const std::string& path) {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0 ? status.st_mode & S_IFMT : 0;
}

int remove_entry(const char* entry, const struct stat*, int, FTW*) {
  return retrying([&] { return std::remove(entry); });
}

DIR* open_stream(const std::string& folder) {
  for (;;) {
    DIR* const stream = ::opendir(folder.c_str());
    if (stream != nullptr || errno != EINTR) return stream;
  }
}

/// The mark of a FreshFolder: its lock's file.
constexpr std::string_view kUnfinished = ".qlorapp-unfinished";
constexpr std::string_view kFirstRead = "config.json";  // without it no reader accepts a model's folder

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

bool has_entry(const std::string& folder, std::string_view name) {
  struct stat status {};
  return ::lstat(path_in(folder, name).c_str(), &status) == 0;
}

bool is_same_file(const std::string& a, const std::string& b) {
  struct stat first {
  }, second{};
  return ::stat(a.c_str(), &first) == 0 && ::stat(b.c_str(), &second) == 0 && first.st_dev == second.st_dev &&
         first.st_ino == second.st_ino;
}

std::vector<std::string> names_in(const std::string& folder) {
  const auto fail = [&](int error) {
    throw IoError(message("[folder] cannot read {}: {}. Check its permissions.", folder, std::strerror(error)), error);
  };
  std::vector<std::string> names;
  const std::unique_ptr<DIR, int (*)(DIR*)> stream(open_stream(folder), ::closedir);
  if (!stream && (errno == ENOENT || errno == ENOTDIR)) return names;
  if (!stream) fail(errno);
  for (;;) {
    errno = 0;
    const dirent* const entry = ::readdir(stream.get());
    if (entry == nullptr && errno == EINTR) continue;
    if (entry == nullptr && errno != 0) fail(errno);
    if (entry == nullptr) break;
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::string name_list(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += name + '\0';
  return text;
}

std::vector<std::string> names_of_list(std::string_view text) {
  const char end = text.find('\0') == std::string_view::npos ? '\n' : '\0';
  std::vector<std::string> names;
  for (size_t begin = 0; begin < text.size();) {
    const size_t stop = std::min(text.find(end, begin), text.size());
    names.emplace_back(text.substr(begin, stop - begin));
    begin = stop + 1;
  }
  return names;
}

bool is_name_inside(std::string_view name) {
  constexpr size_t kLongest = 4096;
  if (name.empty() || name.size() > kLongest) return false;
  while (true) {
    const size_t slash = name.find('/');
    const std::string_view part = name.substr(0, slash);
    if (part.empty() || part == "." || part == ".." || part.find('\0') != std::string_view::npos) return false;
    if (slash == std::string_view::npos) return true;
    name.remove_prefix(slash + 1);
  }
}

bool is_plain_file(const std::string& folder, const std::string& name) {
  for (size_t slash = name.find('/');; slash = name.find('/', slash + 1)) {
    struct stat status {};
    if (::lstat(path_in(folder, name.substr(0, slash)).c_str(), &status) != 0) return false;
    if (slash == std::string::npos) return S_ISREG(status.st_mode);
    if (!S_ISDIR(status.st_mode)) return false;
  }
}

void make_folders(std::string_view where, const std::string& path) {
  if (is_folder(path)) return;
  const std::string parent = parent_of(path);
  if (parent != path && !exists(parent)) make_folders(where, parent);
  if (retrying([&] { return ::mkdir(path.c_str(), 0777); }) == 0) return flush(parent);
  if (errno == EEXIST && is_folder(path)) return;
  const int error = errno;
  throw IoError(message("[{}] cannot make {}: {}. Name another folder.", where, path, std::strerror(error)), error);
}

void remove_folder(const std::string& path) { ::nftw(path.c_str(), remove_entry, 16, FTW_DEPTH | FTW_PHYS); }

void flush(const std::string& path) {
  const int descriptor = retrying([&] { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK); });
  const int error = descriptor < 0 || retrying([&] { return ::fsync(descriptor); }) != 0 ? errno : 0;
  if (descriptor >= 0) ::close(descriptor);
  // EINVAL: a file system that needs no flush. EACCES: a folder that may be written into but not read.
  if (error != 0 && error != EINVAL && error != EACCES)
    throw IoError(message("[output] {} cannot be flushed to the disk: {}.", path, std::strerror(error)), error);
}

void flush_tree(const std::string& folder) {
  for (const std::string& name : names_in(folder)) {
    const std::string path = path_in(folder, name);
    is_folder(path) ? flush_tree(path) : flush(path);
  }
  flush(folder);
}

bool is_staging(std::string_view folder) {
  const auto is_one = [](std::string_view name, std::string_view prefix) {
    return name.starts_with(prefix) && name.size() > prefix.size() &&
           name.find_first_not_of("0123456789abcdef", prefix.size()) == std::string_view::npos;
  };
  for (size_t begin = 0; begin < folder.size();) {
    const size_t end = std::min(folder.find('/', begin), folder.size());
    const std::string_view name = folder.substr(begin, end - begin);
    if (is_one(name, kUpdatePrefix) || is_one(name, kCheckpointPrefix)) return true;
    begin = end + 1;
  }
  return false;
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
  if (existed_ && !exists(path_in(folder_, std::string(kUnfinished))))
    finish_update(folder_, kFirstRead);  // complete but for its end
  const auto check_empty = [&](bool may_be_left) {
    const auto names = names_in(folder_);
    const bool is_left = may_be_left && std::find(names.begin(), names.end(), kUnfinished) != names.end();
    const bool is_empty = std::all_of(names.begin(), names.end(), [](const auto& name) { return name.starts_with(".qlorapp-"); });
    QLORAPP_CHECK_VALUE(is_empty || is_left, "[output] {} must be new or empty; it is not. Name another folder.", folder_);
  };
  check_empty(true);
  unfinished_ = std::make_unique<FolderLock>(folder_, kUnfinished);
  remove_left();
  check_empty(false);  // files that an interrupted program did not write, or another has finished meanwhile
  files_ = std::make_unique<FolderUpdate>(folder_, std::string(kFirstRead));
}

/// What a killed program had put into place. It names its files in the mark before it does.
void FreshFolder::remove_left() const {
  drop_update(folder_);
  const std::string& text = unfinished_->left();
  const size_t holder = std::min(text.find('\n'), text.size());
  for (const std::string& name : names_of_list(std::string_view(text).substr(std::min(holder + 1, text.size())))) {
    if (is_name_inside(name) && is_plain_file(folder_, name))
      (void)retrying([&] { return ::unlink(path_in(folder_, name).c_str()); });
  }
}

const std::string& FreshFolder::path() const { return files_->staging(); }

void FreshFolder::keep() {
  files_->seal();
  unfinished_->note(files_->files());
  files_->commit();
  unfinished_->remove_file();
  kept_ = true;
}

FreshFolder::~FreshFolder() {
  if (!kept_ && files_) {
    try {
      const std::vector<std::string> names = unfinished_->noted();
      drop_update(folder_);
      for (const std::string& name : names) (void)retrying([&] { return ::unlink(path_in(folder_, name).c_str()); });
    } catch (const Error&) {}  // the mark stays, and the next program tries again
  }
  files_.reset();
  unfinished_.reset();
  if (!kept_ && !existed_) ::rmdir(folder_.c_str());
}

}  // namespace qlorapp::files
