// SPDX-License-Identifier: Apache-2.0
#include "files/file_reader.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/check.hpp"
#include "core/printable.hpp"
#include "files/retry.hpp"

namespace qlorapp::files {
namespace {

// Without O_NONBLOCK, opening a pipe without a writer would wait for ever.
constexpr int kOpenFlags = O_RDONLY | O_CLOEXEC | O_NONBLOCK;

[[noreturn]] void fail(const std::string& path, std::string_view rule, int error) {
  throw IoError(message("[{}] {}; {}. Check the path and its permissions.", path, rule, std::strerror(error)), error);
}

int64_t modified(const struct stat& status) { return int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec; }

bool is_cache_blob(std::string_view target) {
  constexpr std::string_view kPrefix = "../../blobs/";
  if (!target.starts_with(kPrefix) || target.size() == kPrefix.size()) return false;
  return target.substr(kPrefix.size()).find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

}  // namespace

FileReader::FileReader(const std::string& path) : FileReader(retrying([&] { return ::open(path.c_str(), kOpenFlags); }), path) {}

FileReader::FileReader(int descriptor, std::string path) : descriptor_(descriptor), path_(std::move(path)) {
  if (descriptor_ < 0) fail(path_, "the file must be readable", errno);
  struct stat status {};
  const int failed = ::fstat(descriptor_, &status) != 0 ? errno : 0;
  if (failed != 0 || !S_ISREG(status.st_mode)) {
    ::close(std::exchange(descriptor_, -1));
    if (failed != 0) fail(path_, "the file must be readable", failed);
    throw FormatError(message("[{}] must be a regular file; got a {}. Name the file itself.", path_,
                              S_ISDIR(status.st_mode) ? "folder" : "pipe or device"));
  }
  size_ = status.st_size;
  modified_ = modified(status);
}

FileReader FileReader::open_inside(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return open_inside(".", path);
  return open_inside(slash == 0 ? "/" : path.substr(0, slash), path.substr(slash + 1));
}

FileReader FileReader::open_inside(const std::string& folder, const std::string& name) {
  const std::string path = folder + "/" + name;
  QLORAPP_CHECK_FORMAT(
      !name.empty() && name != "." && name != ".." && name.find_first_of(std::string_view("/\0", 2)) == std::string::npos,
      "[{}] file names must not lead out of the folder; got {}. Do not use this checkpoint.", folder, printable(name));
  const int directory = retrying([&] { return ::open(folder.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECTORY); });
  if (directory < 0) fail(path, "the file must be readable", errno);
  int descriptor = retrying([&] { return ::openat(directory, name.c_str(), kOpenFlags | O_NOFOLLOW); });
  int error = errno;
  std::string target(4096, '\0');
  bool leads_out = false;
  if (descriptor < 0 && error == ELOOP) {
    const ssize_t length = ::readlinkat(directory, name.c_str(), target.data(), target.size());
    target.resize(length < 0 ? 0 : static_cast<size_t>(length));
    leads_out = !is_cache_blob(target);
    if (!leads_out) {
      descriptor = retrying([&] { return ::openat(directory, target.c_str(), kOpenFlags | O_NOFOLLOW); });
      error = errno;
    }
  }
  ::close(directory);
  QLORAPP_CHECK_FORMAT(!leads_out,
                       "[{}] a link in a model folder must be the Hugging Face cache's ../../blobs/<hex>; it points to {}. Copy "
                       "the file into the folder.",
                       path, printable(target));
  errno = error;
  return FileReader(descriptor, path);
}

FileReader::FileReader(FileReader&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)),
      size_(other.size_),
      modified_(other.modified_),
      path_(std::move(other.path_)) {}

FileReader& FileReader::operator=(FileReader&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  std::swap(size_, other.size_);
  std::swap(modified_, other.modified_);
  std::swap(path_, other.path_);
  return *this;
}

FileReader::~FileReader() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void FileReader::read_at(int64_t offset, std::span<std::byte> into) const {
  size_t done = 0;
  while (done < into.size()) {
    const size_t piece = std::min(into.size() - done, size_t{1} << 30);  // Linux moves at most 2 GiB in one call
    const ssize_t got = ::pread(descriptor_, into.data() + done, piece, static_cast<off_t>(offset) + static_cast<off_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail(path_, "reading failed", errno);
    QLORAPP_CHECK_FORMAT(got > 0, "[{}] the file must have {} bytes; it ends at {}. It is truncated: copy or download it again.",
                         path_, offset + static_cast<int64_t>(into.size()), offset + static_cast<int64_t>(done));
    done += static_cast<size_t>(got);
  }
}

void FileReader::check_unchanged() const {
  struct stat status {};
  if (::fstat(descriptor_, &status) != 0) fail(path_, "the file must be readable", errno);
  QLORAPP_CHECK_FORMAT(status.st_size == size_ && modified(status) == modified_,
                       "[{}] the file must not change while it is read; it did. Load it again after it is written.", path_);
}

std::string FileReader::read_all(size_t max_bytes) const {
  QLORAPP_CHECK_FORMAT(size_ <= static_cast<int64_t>(max_bytes),
                       "[{}] may have at most {} bytes; got {}. The file is of another kind.", path_, max_bytes, size_);
  std::string text(static_cast<size_t>(size_), '\0');
  read_at(0, std::as_writable_bytes(std::span(text)));
  return text;
}

}  // namespace qlorapp::files
