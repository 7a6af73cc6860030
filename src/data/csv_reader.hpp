// SPDX-License-Identifier: Apache-2.0
/// Records of a .csv or .tsv file (RFC 4180). Torch-free.
///
/// A field may stand in quotes; then it may hold separators, line ends and doubled quotes. A record ends at LF, CRLF or CR. An empty
/// line is no record. Where RFC 4180 is silent, Python's csv module decides: a quote inside an unquoted field is a character.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "byte_stream.hpp"

namespace qlorapp {

class CsvReader {
 public:
  static constexpr std::size_t kMostFields = 1024;

  /// @param separator  ',' or '\t'.  @param limit  bytes that a record may have.
  CsvReader(ByteStream& bytes, char separator, std::size_t limit) : bytes_(bytes), separator_(separator), limit_(limit) {}

  /// Replaces `fields` by those of the next record. @returns false at the end of the file.
  /// @throws FormatError "[file:line] …" for a quote that does not close, text behind a closing quote, ill-formed UTF-8, and a
  /// record above the limit or with more than kMostFields fields.
  [[nodiscard]] bool next(std::vector<std::string>& fields);

  /// Where the last record began, from 1.
  [[nodiscard]] int64_t line() const { return line_; }
  [[nodiscard]] int64_t blank_lines() const { return blank_lines_; }

 private:
  void read_quoted(std::string& field);
  void read_plain(std::string& field);
  void append(std::string& field, int c);
  [[nodiscard]] bool ends_record(int c) const { return c < 0 || c == '\n' || c == '\r'; }
  void take_line_end();
  [[nodiscard]] std::string where() const;

  ByteStream& bytes_;
  char separator_;
  std::size_t limit_, size_ = 0;
  int64_t line_ = 0, blank_lines_ = 0;
};

}  // namespace qlorapp
