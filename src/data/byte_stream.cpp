// SPDX-License-Identifier: Apache-2.0
#include "byte_stream.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/check.hpp"
#include "files/folder.hpp"

namespace qlorapp {
namespace {

constexpr std::size_t kBlock = std::size_t{1} << 20;
constexpr int kPipeWait = 10'000;  // milliseconds

/// "org/name" of the hub: two words, no such file, no extension.
bool like_a_hub_name(const std::string& path) {
  return !path.starts_with('/') && !path.starts_with('.') && std::count(path.begin(), path.end(), '/') == 1 &&
         files::file_name(path).find('.') == std::string::npos;
}

std::string advice_for(int number, const std::string& path) {
  if (number == EISDIR) return "Name its files, separated by commas.";
  if (number == ENOENT && like_a_hub_name(path)) {
    return message(
        "If it is a dataset of the Hugging Face Hub, write it to a file in Python: datasets.load_dataset('{}', "
        "split='train').to_json('rows.jsonl').",
        path);
  }
  return "Check the path of the data.";
}

}  // namespace

ByteStream::ByteStream(const std::string& path)
    // Without O_NONBLOCK, opening a pipe without a writer would wait for ever.
    : path_(path), file_{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)}, block_(kBlock, '\0') {
  const int opened = errno;
  struct stat status {};
  const bool is_open = file_.number >= 0 && ::fstat(file_.number, &status) == 0;
  const int number = !is_open ? opened : S_ISDIR(status.st_mode) ? EISDIR : 0;
  if (number != 0) {
    throw IoError(message("[{}] cannot be read: {}. {}", path, std::strerror(number), advice_for(number, path)), number);
  }
  if (S_ISFIFO(status.st_mode)) await_writer();
  (void)::fcntl(file_.number, F_SETFL, ::fcntl(file_.number, F_GETFL) & ~O_NONBLOCK);
  if (front().starts_with("\x1F\x8B")) {
    packed_ = std::string(front());
    at_ = size_;
    gzip_ = std::make_unique<GzipReader>([this](std::span<char> into) { return read_file(into); }, path_);
  }
  if (front().starts_with("\xEF\xBB\xBF")) at_ += 3;
}

ByteStream::Descriptor::~Descriptor() {
  if (number >= 0) ::close(number);
}

void ByteStream::await_writer() {
  pollfd pipe{file_.number, POLLIN, 0};
  int ready = 0;
  while ((ready = ::poll(&pipe, 1, kPipeWait)) < 0 && errno == EINTR) continue;
  if (ready > 0) return;
  // 0: no process has it open for writing. EAGAIN: one has, and takes its time. A null read would not tell.
  char first = 0;
  const ssize_t got = ::read(file_.number, &first, 1);
  if (got > 0) packed_.assign(1, first);
  if (got > 0 || (got < 0 && errno == EAGAIN)) return;
  throw IoError(message("[{}] is a pipe, and nothing was written into it for {} s. Start its writer first, or name a file.", path_,
                        kPipeWait / 1000),
                ETIMEDOUT);
}

std::size_t ByteStream::read_file(std::span<char> into) {
  std::size_t size = std::min(into.size(), packed_.size());
  std::memcpy(into.data(), packed_.data(), size);
  packed_.erase(0, size);
  while (size < into.size()) {
    const ssize_t got = ::read(file_.number, into.data() + size, into.size() - size);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw IoError(message("[{}] cannot be read to its end: {}. Check the disk.", path_, std::strerror(errno)), errno);
    if (got == 0) break;
    size += static_cast<std::size_t>(got);
  }
  return size;
}

std::string_view ByteStream::front() {
  if (at_ == size_) {
    at_ = 0;
    size_ = gzip_ ? gzip_->read(block_) : read_file(block_);
  }
  return std::string_view(block_).substr(at_, size_ - at_);
}

int ByteStream::peek() {
  const std::string_view next = front();
  return next.empty() ? -1 : static_cast<unsigned char>(next.front());
}

int ByteStream::take() {
  const int c = peek();
  if (c >= 0) {
    ++at_;
    column_ += (c & 0xC0) == 0x80 ? 0 : 1;
    if (c == '\n') {
      ++line_;
      column_ = 1;
    }
  }
  return c;
}

bool ByteStream::take_line(std::string& into, std::size_t limit) {
  bool any = false;
  column_ = 1;
  for (std::string_view next = front(); !next.empty() && into.size() <= limit; next = front()) {
    any = true;
    const std::size_t end = next.find('\n');
    const std::string_view part = next.substr(0, end);
    into += part;
    at_ += part.size();
    if (end == std::string_view::npos) continue;
    take();
    break;
  }
  return any;
}

}  // namespace qlorapp
