// SPDX-License-Identifier: Apache-2.0
#include "row_reader.hpp"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <string>

#include "qlorapp/core/check.hpp"
#include "qlorapp/format/folder.hpp"

namespace qlorapp {
namespace {

constexpr bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\n'; }

/// The file byte by byte, a megabyte at a time.
class Bytes {
 public:
  explicit Bytes(const std::string& path) : path_(path), file_(path, std::ios::binary), block_(1 << 20, '\0') {
    const int opened = errno;
    const int number = format::is_folder(path) ? EISDIR : opened;
    if (!file_ || number == EISDIR) {
      throw IoError(concat("[", path, "] cannot be read: ", std::strerror(number), ". Check the path of the data."), number);
    }
  }

  /// @returns the next byte without taking it, or -1 at the end.
  int peek() {
    if (at_ == size_) {
      file_.read(block_.data(), static_cast<std::streamsize>(block_.size()));
      if (file_.bad()) throw IoError(concat("[", path_, "] cannot be read to its end. Check the disk."), EIO);
      size_ = static_cast<std::size_t>(file_.gcount());
      at_ = 0;
    }
    return size_ == 0 ? -1 : static_cast<unsigned char>(block_[at_]);
  }
  int take() {
    const int c = peek();
    if (c >= 0) {
      ++at_;
      line_ += c == '\n' ? 1 : 0;
    }
    return c;
  }
  [[nodiscard]] int64_t line() const { return line_; }
  [[nodiscard]] std::string_view front() {
    peek();
    return std::string_view(block_).substr(at_, size_ - at_);
  }
  void skip(std::size_t bytes) { at_ += bytes; }

 private:
  const std::string& path_;
  std::ifstream file_;
  std::string block_;
  std::size_t at_ = 0, size_ = 0;
  int64_t line_ = 1;
};

class RowReader {
 public:
  RowReader(const std::string& path, const std::function<void(std::string_view, int64_t)>& visit)
      : path_(path), bytes_(path), visit_(visit) {}

  int64_t run() {
    const std::string_view front = bytes_.front();
    QLORAPP_CHECK_FORMAT(!front.starts_with("\xFF\xFE") && !front.starts_with("\xFE\xFF"), "[", path_,
                         "] rows must be UTF-8; got UTF-16. Save the file as UTF-8.");
    QLORAPP_CHECK_FORMAT(!front.starts_with("\x1F\x8B") && !front.starts_with("PAR1"), "[", path_,
                         "] rows must be JSON lines; got a ", front[0] == 'P' ? "parquet" : "gzip",
                         " file. Convert it: datasets.load_dataset(…).to_json('rows.jsonl').");
    if (front.starts_with("\xEF\xBB\xBF")) bytes_.skip(3);
    if (bytes_.front().empty()) return 0;
    int64_t blank = 0;
    while (bytes_.peek() >= 0 && is_blank(static_cast<char>(bytes_.peek()))) {
      if (bytes_.take() == '\n') ++blank;
    }
    if (bytes_.peek() == '[') array();
    else blank += lines();
    return blank;
  }

 private:
  void append(std::string& row, int c, int64_t line) const {
    row += static_cast<char>(c);
    QLORAPP_CHECK_FORMAT(row.size() <= kLargestRow, "[", path_, ":", line, "] a row may have ", kLargestRow,
                         " bytes; this one has more. Split it into several rows.");
  }

  int64_t lines() {
    int64_t blank = 0;
    std::string row;
    while (bytes_.peek() >= 0) {
      const int64_t line = bytes_.line();
      row.clear();
      int c = bytes_.take();
      for (; c >= 0 && c != '\n'; c = bytes_.take()) append(row, c, line);
      if (row.find_first_not_of(" \t\r") == std::string::npos) ++blank;
      else visit_(row, line);
    }
    return blank;
  }

  /// Cuts the elements of the array apart; each is parsed, and found malformed, on its own.
  void array() {
    bytes_.take();
    std::string row;
    for (bool first = true, closed = false; !closed; first = false) {
      skip_blanks();
      const int64_t line = bytes_.line();
      row.clear();
      int depth = 0;
      bool in_string = false;
      for (int c = bytes_.take();; c = bytes_.take()) {
        QLORAPP_CHECK_FORMAT(c >= 0, "[", path_, ":", line, "] the array of rows must end with ]; the file ends before. ",
                             "It may have been cut off: write it again.");
        if (depth == 0 && !in_string && (c == ',' || c == ']')) {
          closed = c == ']';
          break;
        }
        if (c == '\\' && in_string) {
          append(row, c, line);
          c = bytes_.take();
        } else if (c == '"') {
          in_string = !in_string;
        } else if (!in_string) {
          depth += c == '{' || c == '[' ? 1 : c == '}' || c == ']' ? -1 : 0;
        }
        append(row, c, line);
      }
      if (!(first && closed && row.empty())) visit_(row, line);
    }
    skip_blanks();
    QLORAPP_CHECK_FORMAT(bytes_.peek() < 0, "[", path_, ":", bytes_.line(),
                         "] nothing may stand behind the array of rows. For one row a line, leave the brackets out.");
  }

  void skip_blanks() {
    while (bytes_.peek() >= 0 && is_blank(static_cast<char>(bytes_.peek()))) bytes_.take();
  }

  const std::string& path_;
  Bytes bytes_;
  const std::function<void(std::string_view, int64_t)>& visit_;
};

}  // namespace

int64_t for_each_row(const std::string& path, const std::function<void(std::string_view row, int64_t line)>& visit) {
  return RowReader(path, visit).run();
}

}  // namespace qlorapp
