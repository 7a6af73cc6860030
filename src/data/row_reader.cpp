// SPDX-License-Identifier: Apache-2.0
#include "row_reader.hpp"

#include <algorithm>
#include <array>
#include <new>
#include <optional>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "byte_stream.hpp"
#include "core/check.hpp"
#include "csv_reader.hpp"
#include "text/unicode.hpp"

namespace qlorapp {
namespace {

constexpr bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\n'; }
bool is_blank(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return is_blank(c); });
}

struct Signature {
  std::string_view bytes, name, advice;
};
constexpr std::string_view kFromPython =
    "In Python, pass datasets.load_dataset(…) to SFTTrainer. For the command, write rows first: .to_json('rows.jsonl').";
constexpr std::string_view kUnpack = "Unpack it, or compress it with gzip.";
using namespace std::string_view_literals;
constexpr std::array<Signature, 9> kOtherFiles{{
    {"\xFF\xFE"sv, "UTF-16", "Save the file as UTF-8."},
    {"\xFE\xFF"sv, "UTF-16", "Save the file as UTF-8."},
    {"PAR1"sv, "a Parquet file", kFromPython},
    {"ARROW1"sv, "an Arrow file", kFromPython},
    {"PK\x03\x04"sv, "a zip archive (or a spreadsheet)", "Unpack it, or save the sheet as .csv."},
    {"\x28\xB5\x2F\xFD"sv, "a zstd file", kUnpack},
    {"BZh"sv, "a bzip2 file", kUnpack},
    {"\xFD"
     "7zXZ\0"sv,
     "an xz file", kUnpack},
    {"\x1F\x8B"sv, "a gzip file in a gzip file", "Unpack it once."},
}};

/// The key of {"key": [ { … at the beginning of a file, as in {"data": [{…}, …]}.
std::optional<std::string_view> wrapping_key(std::string_view text) {
  const auto skip = [&text](char c) {
    while (!text.empty() && is_blank(text.front())) text.remove_prefix(1);
    const bool there = !text.empty() && text.front() == c;
    if (there) text.remove_prefix(1);
    return there;
  };
  if (!skip('{') || !skip('"')) return std::nullopt;
  const std::string_view key = text.substr(0, text.find('"'));
  text.remove_prefix(std::min(text.size(), key.size() + 1));
  if (!skip(':') || !skip('[') || !skip('{') || key.size() > 64 || key.find('\\') != std::string_view::npos) return std::nullopt;
  return key;
}

constexpr std::size_t kPart = std::size_t{1} << 20;  ///< Of a long line, in bytes.

class RowReader {
 public:
  RowReader(const std::string& path, FileFormat format, const std::string& text_field,
            const std::function<void(Row, int64_t)>& visit)
      : path_(path), text_field_(text_field), bytes_(path), visit_(visit), by_name_(format == FileFormat::kByName) {
    read_.format = by_name_ ? format_of_name(path) : format;
  }

  RowFile run() try {
    for (const Signature& other : kOtherFiles) {
      QLORAPP_CHECK_FORMAT(!bytes_.front().starts_with(other.bytes),
                           "[{}] rows must be JSON lines, a JSON array, CSV, TSV or text in UTF-8; got {}. {}", path_, other.name,
                           other.advice);
    }
    // Standard input has no name that tells the format.
    const bool is_unnamed = by_name_ && path_ == "/dev/stdin";
    if (is_unnamed && bytes_.peek() >= 0 && bytes_.peek() != '{' && bytes_.peek() != '[') read_.format = FileFormat::kLines;
    switch (read_.format) {
      case FileFormat::kCsv:
      case FileFormat::kTsv:
        records();
        break;
      case FileFormat::kLines:
      case FileFormat::kParagraphs:
        text();
        break;
      default:
        json();
    }
    return read_;
  } catch (const std::bad_alloc&) {
    throw OutOfMemoryError(message(
        "[{}] there is not enough memory for the rows. Close other programs, raise the limit of this one (ulimit -v), or split the "
        "file.",
        at(bytes_.line())));
  }

 private:
  [[nodiscard]] std::string at(int64_t line) const { return message("{}:{}", path_, line); }
  void check_size(std::size_t bytes, int64_t line) const {
    QLORAPP_CHECK_FORMAT(bytes <= kLargestRow,
                         "[{}] a row may have at most {} bytes; this one has more. Split it into several rows.", at(line),
                         kLargestRow);
  }

  // --- JSON

  void json() {
    while (bytes_.peek() >= 0 && is_blank(static_cast<char>(bytes_.peek()))) {
      if (bytes_.take() == '\n') ++read_.blank_lines;
    }
    const int first = bytes_.peek();
    if (first < 0) return;
    if (first == '[') array();
    else lines();
  }

  void visit_json(std::string& text, TextPlace begin) {
    Row row = parse_row(text, at(begin.line), /*packs_ids=*/true, begin);
    if (text.capacity() > kPart) text = {};  // a large row is not held twice
    visit_(std::move(row), begin.line);
  }

  void lines() {
    const std::string start(bytes_.front().substr(0, 256));  // for the message about rows inside an object
    const TextPlace first = place();
    std::string row;
    for (TextPlace begin = first; row.clear(), bytes_.take_line(row, kPart); begin = place()) {
      const auto is_whole = [&] { return bytes_.line() > begin.line || bytes_.peek() < 0; };
      while (is_blank(row) && !is_whole()) {
        begin.column += std::ssize(row);
        row.clear();
        bytes_.take_line(row, kPart);
      }
      if (is_blank(row)) {
        ++read_.blank_lines;
        continue;
      }
      if (begin.line == first.line) explain_first(row, is_whole(), start, begin.line);
      if (is_whole()) visit_json(row, begin);
      else visit_long_line(row, begin);
    }
  }

  /// @param part  the line's beginning; its memory takes the other parts.
  void visit_long_line(std::string& part, TextPlace begin) {
    std::size_t size = 0;
    const auto next = [&]() -> std::string_view {
      if (size > 0) {
        part.clear();
        if (bytes_.line() == begin.line) bytes_.take_line(part, kPart);
      }
      size += part.size();
      check_size(size, begin.line);
      return part;
    };
    Row row = parse_row(next, at(begin.line), /*packs_ids=*/true, begin);
    while (!next().empty()) continue;  // the parser ends at a NUL
    visit_(std::move(row), begin.line);
  }

  /// The first line must be a row. The message names the usual other formats.
  /// @param is_whole  otherwise `row` is a long line's beginning.
  void explain_first(std::string_view row, bool is_whole, std::string_view start, int64_t line) const {
    QLORAPP_CHECK_FORMAT(row.front() == '{' || !by_name_ || named_json(),
                         "[{}] rows are read as JSON unless the name of the file ends in .csv, .tsv or .txt; this file does not "
                         "begin with {{ or [. Rename it, or set --data_format.",
                         path_);
    const std::size_t end = row.find_last_not_of(" \t\r");
    const std::optional<std::string_view> key = !is_whole || row[end] == '}' ? std::nullopt : wrapping_key(start);
    QLORAPP_CHECK_FORMAT(!key || *key == "messages" || *key == "conversations",
                         "[{}] a file of rows must be JSON lines or one array; this one is an object over several lines, with rows "
                         "inside '{}'. Write that array alone: json.dump(json.load(open(…))['{}'], …).",
                         at(line), *key, *key);
    QLORAPP_CHECK_FORMAT(end > 0 || row[0] != '{',
                         "[{}] must be valid JSON: one row per line, or an array of rows; got only '{{'. Write each row on one "
                         "line, or all rows in [ ].",
                         at(line));
  }
  [[nodiscard]] bool named_json() const {
    std::string_view name(path_);
    if (name.ends_with(".gz")) name.remove_suffix(3);
    return name.ends_with(".json") || name.ends_with(".jsonl") || name.ends_with(".ndjson");
  }

  /// Cuts the elements of the array apart; each is parsed, and found malformed, on its own.
  void array() {
    bytes_.take();
    std::string row;
    TextPlace comma;
    for (bool first = true, closed = false; !closed; first = false) {
      skip_blanks();
      const TextPlace begin = place();
      TextPlace here = begin;
      row.clear();
      int depth = 0;
      bool in_string = false;
      for (int c = bytes_.take();; here = place(), c = bytes_.take()) {
        QLORAPP_CHECK_FORMAT(
            c >= 0, "[{}] the array of rows must end with ]; the file ends before it. It may be truncated: write it again.",
            at(begin.line));
        if (depth == 0 && !in_string && (c == ',' || c == ']')) {
          closed = c == ']';
          break;
        }
        if (c == '\\' && in_string) {
          row += static_cast<char>(c);
          c = bytes_.take();
        } else if (c == '"') {
          in_string = !in_string;
        } else if (!in_string) {
          depth += c == '{' || c == '[' ? 1 : c == '}' || c == ']' ? -1 : 0;
        }
        row += static_cast<char>(c);
        check_size(row.size(), begin.line);
      }
      const bool is_empty_array = first && closed && row.empty();
      if (row.empty() && !is_empty_array) refuse_comma(closed ? comma : here, closed ? "behind" : "in front of");
      comma = here;
      if (!row.empty()) visit_json(row, begin);
    }
    skip_blanks();
    QLORAPP_CHECK_FORMAT(bytes_.peek() < 0,
                         "[{}] nothing may follow the array of rows. For one row per line, leave the brackets out.",
                         at(bytes_.line()));
  }

  [[noreturn]] void refuse_comma(TextPlace comma, const char* side) const {
    throw FormatError(message("[{}] must be valid JSON; line {}, column {}: there is no row {} the comma. Remove the comma.",
                              at(comma.line), comma.line, comma.column, side));
  }

  [[nodiscard]] TextPlace place() const { return {bytes_.line(), bytes_.column()}; }

  void skip_blanks() {
    while (bytes_.peek() >= 0 && is_blank(static_cast<char>(bytes_.peek()))) bytes_.take();
  }

  // --- CSV

  void records() {
    const bool tabs = read_.format == FileFormat::kTsv;
    CsvReader csv(bytes_, tabs ? '\t' : ',', kLargestRow);
    std::vector<std::string> columns, fields;
    if (csv.next(columns)) check_header(columns, tabs, csv.line());
    while (csv.next(fields)) {
      QLORAPP_CHECK_FORMAT(
          fields.size() == columns.size(),
          "[{}] a row must have {} fields, as the header has; got {}. Quote fields that contain a {} or a line end.",
          at(csv.line()), columns.size(), fields.size(), tabs ? "tab" : "comma");
      Row row = Row::object();
      for (std::size_t i = 0; i < fields.size(); ++i) row.emplace(columns[i], std::move(fields[i]));
      visit_(std::move(row), csv.line());
    }
    read_.blank_lines = csv.blank_lines();
  }

  void check_header(std::vector<std::string>& columns, bool tabs, int64_t line) const {
    QLORAPP_CHECK_FORMAT(columns.size() > 1 || columns[0].find_first_of(tabs ? ",;" : "\t;") == std::string::npos,
                         "[{}] columns must be separated by {}; the header is '{}'. {}", at(line), tabs ? "tabs" : "commas",
                         columns[0].substr(0, 80),
                         tabs ? "Name the file .csv." : "Separate columns by commas, or name a file with tabs .tsv.");
    std::set<std::string_view> seen;
    for (std::size_t i = 0; i < columns.size(); ++i) {
      if (columns[i].empty()) columns[i] = message("Unnamed: {}", i);  // an index that pandas wrote; the name is pandas' own
      QLORAPP_CHECK_FORMAT(seen.insert(columns[i]).second,
                           "[{}] the header must name each column once; '{}' appears twice. Rename one.", at(line),
                           columns[i].substr(0, 80));
    }
  }

  // --- text

  void text() {
    const bool paragraphs = read_.format == FileFormat::kParagraphs;
    std::string row, next;
    int64_t begin = 0, line = bytes_.line();
    const auto finish = [&] {
      if (!row.empty()) visit_text(row, begin);
      row.clear();
    };
    for (; next.clear(), bytes_.take_line(next, kLargestRow); line = bytes_.line()) {
      check_size(next.size(), line);
      if (next.ends_with('\r')) next.pop_back();
      if (is_blank(next)) {
        if (row.empty()) ++read_.blank_lines;  // of a paragraph, the first ends it
        finish();
        continue;
      }
      if (row.empty()) begin = line;
      else row += '\n';
      row += next;
      check_size(row.size(), begin);
      if (!paragraphs) finish();
    }
    finish();
  }

  void visit_text(const std::string& row, int64_t line) {
    const std::size_t bad = unicode::first_invalid_utf8(row);
    QLORAPP_CHECK_FORMAT(bad == std::string::npos, "[{}] text must be UTF-8; byte {} of the row is not. Save the file as UTF-8.",
                         at(line), bad);
    QLORAPP_CHECK_FORMAT(
        !first_text_ || !is_json_object(row),
        "[{}] a .txt file is read as text; this row is a JSON object. Name the file .jsonl, or set --data_format json.", at(line));
    first_text_ = false;
    Row object = Row::object();
    object.emplace(text_field_, row);
    visit_(std::move(object), line);
  }
  static bool is_json_object(const std::string& row) {
    return row.front() == '{' && row.back() == '}' && Row::accept(row.begin(), row.end());
  }

  const std::string& path_;
  const std::string& text_field_;
  ByteStream bytes_;
  const std::function<void(Row, int64_t)>& visit_;
  RowFile read_;
  bool by_name_, first_text_ = true;
};

}  // namespace

FileFormat format_of_name(const std::string& path) {
  std::string name = path;
  std::transform(name.begin(), name.end(), name.begin(),
                 [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; });
  if (name.ends_with(".gz")) name.resize(name.size() - 3);
  if (name.ends_with(".csv")) return FileFormat::kCsv;
  if (name.ends_with(".tsv") || name.ends_with(".tab")) return FileFormat::kTsv;
  if (name.ends_with(".txt")) return FileFormat::kLines;
  return FileFormat::kJson;
}

RowFile for_each_row(const std::string& path, FileFormat format, const std::string& text_field,
                     const std::function<void(Row row, int64_t line)>& visit) {
  return RowReader(path, format, text_field, visit).run();
}

}  // namespace qlorapp
