// SPDX-License-Identifier: Apache-2.0
#include "csv_reader.hpp"

#include "qlorapp/core/check.hpp"
#include "unicode.hpp"

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
    QLORAPP_CHECK_FORMAT(fields.size() < kMostFields, where(), "a row may have ", kMostFields,
                         " fields; this one has more. Check the separators.");
    std::string& field = fields.emplace_back();
    if (bytes_.peek() == '"') read_quoted(field);
    else read_plain(field);
    const std::size_t bad = unicode::first_invalid_utf8(field);
    QLORAPP_CHECK_FORMAT(bad == std::string::npos, where(), "a field must be UTF-8; byte ", bad, " of field ", fields.size(),
                         " is not. Save the file as UTF-8.");
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
    QLORAPP_CHECK_FORMAT(c >= 0, where(), "a quoted field must end with a quote; the file ends before. Close the quote.");
    if (c != '"') {
      append(field, c);
    } else if (bytes_.peek() == '"') {
      append(field, bytes_.take());
    } else {
      break;
    }
  }
  const int behind = bytes_.peek();
  QLORAPP_CHECK_FORMAT(behind == separator_ || ends_record(behind), where(),
                       "a separator or the end of the line must follow a closing quote; got more text. Double the quotes inside a "
                       "quoted field.");
}

void CsvReader::read_plain(std::string& field) {
  while (bytes_.peek() != separator_ && !ends_record(bytes_.peek())) append(field, bytes_.take());
}

void CsvReader::append(std::string& field, int c) {
  field += static_cast<char>(c);
  QLORAPP_CHECK_FORMAT(++size_ <= limit_, where(), "a row may have ", limit_,
                       " bytes; this one has more. Close its quotes, or split it into several rows.");
}

void CsvReader::take_line_end() {
  const int c = bytes_.take();
  if (c == '\r' && bytes_.peek() == '\n') bytes_.take();
}

std::string CsvReader::where() const { return concat("[", bytes_.path(), ":", line_, "] "); }

}  // namespace qlorapp
