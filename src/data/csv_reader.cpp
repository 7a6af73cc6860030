// SPDX-License-Identifier: Apache-2.0
#include "csv_reader.hpp"

#include "core/check.hpp"
#include "text/unicode.hpp"

namespace qlorapp {

bool CsvReader::next(std::vector<std::string>& fields) {
  while (bytes_.peek() == '\n' || bytes_.peek() == '\r') {
    take_line_end();
    ++blank_lines_;
  }
  if (bytes_.peek() < 0) return false;
  line_ = bytes_.line();
  size_ = 0;
  fields.clear();
  for (bool more = true; more;) {
    QLORAPP_CHECK_FORMAT(fields.size() < kMostFields,
                         "{}a row may have at most {} fields; this one has more. Check the separators.", where(), kMostFields);
    std::string& field = fields.emplace_back();
    if (bytes_.peek() == '"') read_quoted(field);
    else read_plain(field);
    const std::size_t bad = unicode::first_invalid_utf8(field);
    QLORAPP_CHECK_FORMAT(bad == std::string::npos, "{}a field must be UTF-8; byte {} of field {} is not. Save the file as UTF-8.",
                         where(), bad, fields.size());
    more = bytes_.peek() == separator_;
    if (more) bytes_.take();
  }
  take_line_end();
  return true;
}

void CsvReader::read_quoted(std::string& field) {
  bytes_.take();
  for (;;) {
    const int c = bytes_.take();
    QLORAPP_CHECK_FORMAT(c >= 0, "{}a quoted field must end with a quote; the file ends before it. Close the quote.", where());
    if (c != '"') {
      append(field, c);
    } else if (bytes_.peek() == '"') {
      append(field, bytes_.take());
    } else {
      break;
    }
  }
  const int behind = bytes_.peek();
  QLORAPP_CHECK_FORMAT(
      behind == separator_ || ends_record(behind),
      "{}a separator or the end of the line must follow a closing quote; got more text. Double the quotes inside a quoted field.",
      where());
}

void CsvReader::read_plain(std::string& field) {
  while (bytes_.peek() != separator_ && !ends_record(bytes_.peek())) append(field, bytes_.take());
}

void CsvReader::append(std::string& field, int c) {
  field += static_cast<char>(c);
  QLORAPP_CHECK_FORMAT(++size_ <= limit_,
                       "{}a row may have at most {} bytes; this one has more. Close its quotes, or split it into several rows.",
                       where(), limit_);
}

void CsvReader::take_line_end() {
  const int c = bytes_.take();
  if (c == '\r' && bytes_.peek() == '\n') bytes_.take();
}

std::string CsvReader::where() const { return message("[{}:{}] ", bytes_.path(), line_); }

}  // namespace qlorapp
