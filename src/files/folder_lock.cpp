// SPDX-License-Identifier: Apache-2.0
#include "files/folder_lock.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <ctime>

#include "core/check.hpp"
#include "core/printable.hpp"
#include "files/folder.hpp"
#include "files/retry.hpp"
#include "qlorapp/core/log.hpp"

namespace qlorapp::files {
namespace {

/// "process 4711 on host, since 2026-11-23T20:15:00Z".
std::string holder() {
  std::array<char, 256> host{}, time{};
  (void)::gethostname(host.data(), host.size() - 1);
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  (void)::gmtime_r(&now, &utc);
  (void)std::strftime(time.data(), time.size(), "%FT%TZ", &utc);
  return message("process {} on {}, since {}", static_cast<int64_t>(::getpid()), host.data(), time.data());
}

std::string content(int descriptor) {
  constexpr size_t kMost = size_t{1} << 20;
  std::string text;
  for (std::array<char, 4096> part{}; text.size() < kMost;) {
    const ssize_t size = retrying([&] { return ::pread(descriptor, part.data(), part.size(), static_cast<off_t>(text.size())); });
    if (size <= 0) break;
    text.append(part.data(), static_cast<size_t>(size));
  }
  return text;
}

std::string first_line(const std::string& text) { return printable(text.substr(0, text.find('\n'))); }

/// Whether the locked file is the one that has the name now, and not one that its holder has just removed.
bool is_at(int descriptor, const std::string& path) {
  struct stat locked {
  }, named{};
  return ::fstat(descriptor, &locked) == 0 && ::stat(path.c_str(), &named) == 0 && locked.st_ino == named.st_ino &&
         locked.st_dev == named.st_dev;
}

}  // namespace

FolderLock::FolderLock(const std::string& folder, std::string_view name) : folder_(folder), made_folder_(!exists(folder)) {
  make_folders("output", folder);
  path_ = path_in(folder, name);
  while (true) {
    descriptor_ = retrying([&] { return ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666); });
    if (descriptor_ < 0) {
      const int error = errno;
      throw IoError(message("[output] cannot write to {}: {}. Name another folder.", folder, std::strerror(error)), error);
    }
    const int failed = retrying([&] { return ::flock(descriptor_, LOCK_EX | LOCK_NB); }) == 0 ? 0 : errno;
    if (failed == EWOULDBLOCK) {
      const std::string who = first_line(content(descriptor_));
      ::close(descriptor_);
      throw IoError(message("[output] {} is in use by another run ({}). Wait for its end, or name another folder.", folder, who),
                    failed);
    }
    if (failed != 0) {  // a network file system without locks
      log_warning(
          message("[output] {} cannot be locked ({}). Start no other run that writes into it.", folder, std::strerror(failed)));
      break;
    }
    if (is_at(descriptor_, path_)) break;
    ::close(descriptor_);
  }
  left_ = content(descriptor_);
  if (was_left())
    log_info(message("[output] {}: the run before this one ended without cleaning up ({}).", folder, first_line(left_)));
  const std::string text = holder();
  if (::ftruncate(descriptor_, 0) == 0) (void)!::pwrite(descriptor_, text.data(), text.size(), 0);  // for messages only
}

bool FolderLock::is_there() const { return is_at(descriptor_, path_); }

void FolderLock::note(const std::vector<std::string>& names) {
  noted_ = names;
  const std::string text = holder() + '\n' + name_list(names);
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t size =
        retrying([&] { return ::pwrite(descriptor_, text.data() + done, text.size() - done, static_cast<off_t>(done)); });
    if (size <= 0) break;
    done += static_cast<size_t>(size);
  }
  if (done < text.size() || retrying([&] { return ::fsync(descriptor_); }) != 0)
    throw IoError(message("[output] cannot write {}: {}. Check the free space.", path_, std::strerror(errno)), errno);
}

void FolderLock::remove_file() {
  if (retrying([&] { return ::unlink(path_.c_str()); }) != 0)
    throw IoError(message("[output] cannot remove {}: {}. Check the folder's permissions.", path_, std::strerror(errno)), errno);
  flush(folder_);
}

FolderLock::~FolderLock() {
  (void)retrying([&] { return ::unlink(path_.c_str()); });
  ::close(descriptor_);
  if (made_folder_) (void)::rmdir(folder_.c_str());
}

}  // namespace qlorapp::files
