// SPDX-License-Identifier: Apache-2.0
#include "event_file.hpp"

#include <unistd.h>

#include <array>
#include <bit>
#include <chrono>
#include <span>

#include "core/check.hpp"
#include "files/checksum.hpp"
#include "files/folder.hpp"

namespace qlorapp::cli {
namespace {

/// A message in protocol buffers.
class WireMessage {
 public:
  void number(int field, double value) {
    tag(field, 1);
    fixed(std::bit_cast<uint64_t>(value));
  }
  void number(int field, float value) {
    tag(field, 5);
    fixed(std::bit_cast<uint32_t>(value));
  }
  void integer(int field, int64_t value) {
    tag(field, 0);
    varint(static_cast<uint64_t>(value));
  }
  void text(int field, std::string_view value) {
    tag(field, 2);
    varint(value.size());
    bytes_ += value;
  }
  [[nodiscard]] const std::string& bytes() const { return bytes_; }

 private:
  void tag(int field, int type) { varint(static_cast<uint64_t>(field << 3 | type)); }
  void varint(uint64_t value) {
    for (; value >= 0x80; value >>= 7) bytes_ += static_cast<char>(value | 0x80);
    bytes_ += static_cast<char>(value);
  }
  void fixed(auto value) {
    const auto bytes = std::bit_cast<std::array<char, sizeof value>>(value);
    bytes_.append(bytes.data(), bytes.size());
  }

  std::string bytes_;
};

WireMessage event_at(double seconds) {
  WireMessage event;
  event.number(1, seconds);
  return event;
}

double now() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }

void append(std::string& record, auto value) {
  const auto bytes = std::bit_cast<std::array<char, sizeof value>>(value);
  record.append(bytes.data(), bytes.size());
}

uint32_t masked_checksum(std::string_view bytes) {
  const uint32_t crc = files::crc32c(std::as_bytes(std::span(bytes)));
  return std::rotr(crc, 15) + 0xa282ead8u;
}

std::string host() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "localhost";
}

}  // namespace

EventFile::EventFile(const std::string& folder) {
  files::make_folders("report_to", folder);
  const double seconds = now();
  const std::string path =
      files::path_in(folder, message("events.out.tfevents.{}.{}.{}", static_cast<int64_t>(seconds), host(), ::getpid()));
  file_.emplace(path);
  WireMessage event = event_at(seconds);
  event.text(3, "brain.Event:2");
  write(event.bytes());
}

void EventFile::add(int64_t step, const std::vector<std::pair<std::string, double>>& values) {
  WireMessage summary;
  for (const auto& [tag, number] : values) {
    WireMessage value;
    value.text(1, tag);
    value.number(2, static_cast<float>(number));
    summary.text(1, value.bytes());
  }
  WireMessage event = event_at(now());
  event.integer(2, step);
  event.text(5, summary.bytes());
  write(event.bytes());
}

void EventFile::write(std::string_view event) {
  std::string length, record;
  append(length, static_cast<uint64_t>(event.size()));
  record = length;
  append(record, masked_checksum(length));
  record += event;
  append(record, masked_checksum(event));
  file_->append(record);
}

}  // namespace qlorapp::cli
