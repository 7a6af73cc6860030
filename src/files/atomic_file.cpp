// SPDX-License-Identifier: Apache-2.0
#include "files/atomic_file.hpp"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/check.hpp"
#include "files/folder.hpp"
#include "files/retry.hpp"

namespace qlorapp::files {
namespace {

constexpr std::string_view kTemporaryPrefix = ".qlorapp-", kTemporarySuffix = ".tmp";

/// Differs between processes and within one; a leftover of a killed process with the same id is stepped over.
std::string temporary_name() {
  static std::atomic<uint64_t> counter{0};
  return message("{}{}-{}{}", kTemporaryPrefix, static_cast<int64_t>(::getpid()), counter.fetch_add(1), kTemporarySuffix);
}

}  // namespace

void remove_left_files(const std::string& folder) {
  for (const std::string& name : names_in(folder)) {
    if (!name.starts_with(kTemporaryPrefix) || !name.ends_with(kTemporarySuffix)) continue;
    int process = 0;  // one that is gone: its lock is free and, on this machine, its id is no process's
    const char* const digits = name.data() + kTemporaryPrefix.size();
    if (std::from_chars(digits, name.data() + name.size(), process).ec != std::errc{} || process <= 0) continue;
    if (::kill(process, 0) == 0 || errno == EPERM) continue;
    const std::string path = path_in(folder, name);
    const int left = ::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    if (left < 0) continue;
    if (::flock(left, LOCK_EX | LOCK_NB) == 0) ::unlink(path.c_str());
    ::close(left);
  }
}

void AtomicFile::fail(std::string_view what, int error) const {
  const bool full = error == ENOSPC || error == EDQUOT;
  throw IoError(message("[{}] {}; {}{}", path_, what, std::strerror(error),
                        full ? ". Free some space." : ". Check the path and its permissions."),
                error);
}

AtomicFile::AtomicFile(std::string path) : path_(std::move(path)) {
  const size_t slash = path_.rfind('/');
  folder_ = slash == std::string::npos ? "." : slash == 0 ? "/" : path_.substr(0, slash);
  remove_left_files(folder_);
  for (int attempt = 0; descriptor_ < 0; ++attempt) {
    temporary_ = folder_ + "/" + temporary_name();
    descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (descriptor_ < 0 && errno != EINTR && (errno != EEXIST || attempt == 1000)) fail("its folder must be writable", errno);
  }
  (void)::flock(descriptor_, LOCK_EX | LOCK_NB);  // marks it as being written
  struct stat target {};
  if (::lstat(path_.c_str(), &target) == 0 && S_ISREG(target.st_mode)) {
    (void)::fchmod(descriptor_, target.st_mode & 0777);  // a courtesy: who may read the old file may read the new one
  }
}

AtomicFile::~AtomicFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void AtomicFile::reserve(int64_t bytes) {
  if (bytes <= 0) return;
  while (::fallocate(descriptor_, FALLOC_FL_KEEP_SIZE, 0, static_cast<off_t>(bytes)) != 0) {
    if (errno == EINTR) continue;
    if (errno == EOPNOTSUPP || errno == ENOSYS || errno == EINVAL || errno == ENODEV) return;
    fail(message("the file needs {} bytes", bytes), errno);
  }
}

void AtomicFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor_, bytes.data(), std::min(bytes.size(), size_t{1} << 30));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail("writing failed", errno);
    if (written == 0) fail("writing failed", EIO);
    bytes = bytes.subspan(static_cast<size_t>(written));
  }
}

void AtomicFile::commit() {
  const bool is_flushed_later = is_staging(folder_);
  if (is_flushed_later) {
    (void)::sync_file_range(descriptor_, 0, 0, SYNC_FILE_RANGE_WRITE);  // the disk may begin
  } else if (retrying([&] { return ::fsync(descriptor_); }) != 0) {
    fail("flushing to the disk failed", errno);
  }
  // Some network file systems report a failed write only here. After EINTR the descriptor is closed all the same.
  if (::close(std::exchange(descriptor_, -1)) != 0 && errno != EINTR) fail("closing failed", errno);
  if (retrying([&] { return ::rename(temporary_.c_str(), path_.c_str()); }) != 0) fail("replacing the file failed", errno);
  temporary_.clear();
  if (!is_flushed_later) flush(folder_);
}

void write_file_atomically(const std::string& path, std::string_view content) {
  AtomicFile file(path);
  file.reserve(static_cast<int64_t>(content.size()));
  file.write(content);
  file.commit();
}

}  // namespace qlorapp::files
