// SPDX-License-Identifier: Apache-2.0
#include "temporary_folder.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <ctime>

#include "core/check.hpp"
#include "folder.hpp"
#include "retry.hpp"

namespace qlorapp::files {
namespace {

constexpr std::string_view kPrefix = ".qlorapp-temporary-", kRest = "XXXXXX";
constexpr time_t kSecondsToLock = 60;  ///< Between making a folder and locking it; far more than it takes.

std::string temporary_root() {
  const char* const given = std::getenv("TMPDIR");
  return given == nullptr || *given == '\0' ? "/tmp" : given;
}

int open_locked(const std::string& folder, int operation) {
  const int descriptor = retrying([&] { return ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC); });
  if (descriptor < 0 || retrying([&] { return ::flock(descriptor, operation | LOCK_NB); }) == 0) return descriptor;
  ::close(descriptor);
  return -1;
}

void remove_left_behind(const std::string& root) {
  for (const std::string& name : names_in(root)) {
    if (!name.starts_with(kPrefix) || name.size() != kPrefix.size() + kRest.size()) continue;
    const std::string folder = path_in(root, name);
    struct stat status {};
    const bool is_old = ::lstat(folder.c_str(), &status) == 0 && S_ISDIR(status.st_mode) && status.st_uid == ::geteuid() &&
                        std::time(nullptr) - status.st_mtim.tv_sec > kSecondsToLock;
    const int descriptor = is_old ? open_locked(folder, LOCK_EX) : -1;
    if (descriptor < 0) continue;
    remove_folder(folder);
    ::close(descriptor);
  }
}

}  // namespace

TemporaryFolder::TemporaryFolder(std::string_view where) : owner_(::getpid()) {
  const std::string root = temporary_root();
  try {
    remove_left_behind(root);
  } catch (const IoError&) {  // not to be read: the next call says so, if it matters
  }
  path_ = path_in(root, std::string(kPrefix) + std::string(kRest));
  if (::mkdtemp(path_.data()) == nullptr) {
    const int error = errno;
    throw IoError(message("[{}] no folder can be made in {}: {}. Set TMPDIR.", where, root, std::strerror(error)), error);
  }
  lock_ = open_locked(path_, LOCK_SH);  // without it the folder may go a minute later, on a system that has no locks
}

TemporaryFolder::~TemporaryFolder() {
  if (::getpid() == owner_) remove_folder(path_);
  if (lock_ >= 0) ::close(lock_);
}

}  // namespace qlorapp::files
