// SPDX-License-Identifier: Apache-2.0
/// TensorBoard's event files: numbers of a run, each appended as it comes.
///
///     record   length (8 bytes), its checksum (4), an Event in protocol buffers, its checksum (4)
///     Event    1: wall time (double)   2: step (varint)   3: "brain.Event:2"   or   5: Summary {1: Value {1: tag, 2: float}}
/// Source: TensorFlow's record_writer.h (a checksum is a rotated CRC-32C) and event.proto.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "files/growing_file.hpp"

namespace qlorapp::cli {

class EventFile {
 public:
  /// Makes events.out.tfevents.<seconds>.<host>.<process> in a folder, which is made. @throws IoError.
  explicit EventFile(const std::string& folder);

  [[nodiscard]] const std::string& path() const { return file_->path(); }
  /// Numbers of one step, by tag ("train/loss"). @throws IoError.
  void add(int64_t step, const std::vector<std::pair<std::string, double>>& values);

 private:
  void write(std::string_view event);

  std::optional<files::GrowingFile> file_;
};

}  // namespace qlorapp::cli
