// SPDX-License-Identifier: Apache-2.0
#include "growing_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "core/check.hpp"
#include "folder.hpp"
#include "retry.hpp"

namespace qlorapp::files {

namespace {

IoError not_made(const std::string& path, int error) {
  return {error == EEXIST ? message("[{}] exists already. Choose another name, or remove it.", path)
                          : message("[{}] cannot be made: {}.", path, std::strerror(error)),
          error};
}

}  // namespace

void GrowingFile::check_new(const std::string& path) {
  struct stat status {};
  if (::lstat(path.c_str(), &status) == 0) throw not_made(path, EEXIST);
  if (::access(parent_of(path).c_str(), W_OK | X_OK) != 0) throw not_made(path, errno);
}

GrowingFile::GrowingFile(std::string path, bool must_be_new) : path_(std::move(path)) {
  const int flags = O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | (must_be_new ? O_EXCL : 0);
  descriptor_ = retrying([&] { return ::open(path_.c_str(), flags, 0666); });
  const int error = errno;
  if (descriptor_ < 0) throw not_made(path_, error);
  struct stat status {};
  is_empty_ = ::fstat(descriptor_, &status) == 0 && status.st_size == 0 && S_ISREG(status.st_mode);
}

GrowingFile::~GrowingFile() {
  if (is_empty_) ::unlink(path_.c_str());
  ::close(descriptor_);
}

void GrowingFile::append(std::string_view record) {
  const off_t before = ::lseek(descriptor_, 0, SEEK_END);
  for (size_t done = 0; done < record.size();) {
    const ssize_t count = retrying([&] { return ::write(descriptor_, record.data() + done, record.size() - done); });
    if (count < 0) {
      const int error = errno;
      if (before >= 0) (void)retrying([&] { return ::ftruncate(descriptor_, before); });
      throw IoError(message("[{}] cannot be written: {}.", path_, std::strerror(error)), error);
    }
    done += static_cast<size_t>(count);
  }
  is_empty_ = false;
}

}  // namespace qlorapp::files
