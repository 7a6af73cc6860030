// SPDX-License-Identifier: Apache-2.0
#include "byte_stream.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/check.hpp"
#include "format/folder.hpp"

namespace qlorapp {
namespace {

constexpr std::size_t kBlock = std::size_t{1} << 20;

/// "org/name" of the hub: two words, no such file, no extension.
bool like_a_hub_name(const std::string& path) {
  return !path.starts_with('/') && !path.starts_with('.') && std::count(path.begin(), path.end(), '/') == 1 &&
         format::file_name(path).find('.') == std::string::npos;
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

ByteStream::ByteStream(const std::string& path) : path_(path), file_(path, std::ios::binary), block_(kBlock, '\0') {
  const int opened = errno;
  const int number = format::is_folder(path) ? EISDIR : opened;
  if (!file_ || number == EISDIR) {
    throw IoError(message("[{}] cannot be read: {}. {}", path, std::strerror(number), advice_for(number, path)), number);
  }
  if (front().starts_with("\x1F\x8B")) {
    packed_ = std::string(front());
    at_ = size_;
    gzip_ = std::make_unique<GzipReader>([this](std::span<char> into) { return read_file(into); }, path_);
  }
  if (front().starts_with("\xEF\xBB\xBF")) at_ += 3;
}

std::size_t ByteStream::read_file(std::span<char> into) {
  if (!packed_.empty()) {
    const std::size_t size = std::min(into.size(), packed_.size());
    std::memcpy(into.data(), packed_.data(), size);
    packed_.erase(0, size);
    return size;
  }
  file_.read(into.data(), static_cast<std::streamsize>(into.size()));
  if (file_.bad()) throw IoError(message("[{}] cannot be read to its end. Check the disk.", path_), EIO);
  return static_cast<std::size_t>(file_.gcount());
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
    line_ += c == '\n' ? 1 : 0;
  }
  return c;
}

bool ByteStream::take_line(std::string& into, std::size_t limit) {
  bool any = false;
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
