// SPDX-License-Identifier: Apache-2.0
#include "format/yaml_text.hpp"

#include <charconv>

namespace qlorapp::format {
namespace {

/// Bytes of the UTF-8 character that begins with these; 0: not UTF-8. Surrogates and overlong forms are none.
size_t utf8_length(std::string_view text, uint32_t& character) {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<uint8_t>(text[i]) : uint8_t{0}; };
  const uint8_t first = byte(0);
  const size_t length = first < 0x80 ? 1 : first < 0xC2 ? 0 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : first < 0xF5 ? 4 : 0;
  if (length == 0) return 0;
  character = length == 1 ? first : first & (0xFFU >> (length + 1));
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
    character = character << 6 | (byte(i) & 0x3F);
  }
  const bool too_long = (length == 3 && character < 0x800) || (length == 4 && character < 0x10000);
  const bool outside = (character >= 0xD800 && character <= 0xDFFF) || character > 0x10FFFF;
  return too_long || outside ? 0 : length;
}

void append_utf8(std::string& into, uint32_t character) {
  const auto tail = [&](int shift) { into += static_cast<char>(0x80 | (character >> shift & 0x3F)); };
  if (character < 0x80) {
    into += static_cast<char>(character);
  } else if (character < 0x800) {
    into += static_cast<char>(0xC0 | character >> 6);
    tail(0);
  } else if (character < 0x10000) {
    into += static_cast<char>(0xE0 | character >> 12);
    tail(6);
    tail(0);
  } else {
    into += static_cast<char>(0xF0 | character >> 18);
    tail(12);
    tail(6);
    tail(0);
  }
}

/// Characters that a YAML stream may not hold, and those that readers of YAML 1.1 take for line ends.
bool is_refused(uint32_t c) {
  return (c < 0x20 && c != '\t' && c != '\n' && c != '\r') || (c >= 0x7F && c < 0xA0) || c == 0x2028 || c == 0x2029 ||
         c == 0xFEFF || c == 0xFFFE || c == 0xFFFF;
}

}  // namespace

YamlText::YamlText(std::string_view text, std::string_view where) : text_(text), where_(where) {
  if (text_.starts_with("\xef\xbb\xbf")) text_.remove_prefix(3);
  check_characters();
}

void YamlText::check_characters() {
  while (!at_end()) {
    uint32_t character = 0;
    const size_t length = utf8_length(text_.substr(at_), character);
    if (length == 0) fail("not UTF-8. Save the file as UTF-8");
    if (is_refused(character)) fail("the character U+{:04X} is not allowed", character);
    if (character == '\r' && peek(1) != '\n') fail("a carriage return must be followed by a line feed");
    if (character == '\n') {
      next_line();
    } else {
      at_ += length;
    }
  }
  at_ = line_begin_ = 0;
  line_ = 1;
}

YamlPlace YamlText::place() const {
  size_t column = 1;
  for (size_t i = line_begin_; i < at_ && i < text_.size(); ++i) column += (static_cast<uint8_t>(text_[i]) & 0xC0) != 0x80 ? 1 : 0;
  return {line_, column};
}

void YamlText::fail_at_place(YamlPlace place, const std::string& reason) const {
  throw FormatError(message("[{}] line {}, column {}: {}.", where_, place.line, place.column, reason));
}

void YamlText::next_line() {
  ++at_;  // the line feed
  ++line_;
  line_begin_ = at_;
}

void YamlText::skip_spaces() {
  while (peek() == ' ') advance();
  if (peek() == '\t') fail("a tab. Use spaces");
}

void YamlText::skip_to_content() {
  while (true) {
    skip_spaces();
    if (peek() == '#' && (at_ == line_begin_ || text_[at_ - 1] == ' ')) {
      while (!at_end() && !is_line_end()) advance();
    }
    if (peek() == '\r') advance();
    if (peek() != '\n') break;
    next_line();
  }
  if (at_end() || column() > 0) return;
  const std::string_view rest = text_.substr(at_, 3);
  if (has_content_ && (rest == "---" || rest == "...") && is_blank(peek(3)))
    fail("one document a file: '{}' is not read here", rest);
  if (!has_content_ && rest == "..." && is_blank(peek(3))) fail("one document a file: '...' is not read");
  if (peek() == '%') fail("directives (%) are not read");
}

void YamlText::begin_document() {
  has_content_ = true;
  if (column() > 0 || text_.substr(at_, 3) != "---" || !is_blank(peek(3))) return;
  at_ += 3;
  skip_spaces();
  if (in_line()) fail("content must begin on the line after ---");
}

void YamlText::skip_in_flow(int64_t parent) {
  const size_t line = line_;
  skip_to_content();
  if (at_end()) fail("a bracket is not closed");
  if (line_ != line && column() <= parent) fail("within brackets a line must be indented deeper than the key");
}

void YamlText::end_line() {
  skip_spaces();
  if (!in_line()) return;
  if (peek() == '#') fail("a comment needs a space before it");
  fail("text behind a value: put all of it into quotes");
}

std::string YamlText::quoted_text() {
  const YamlPlace begin = place();
  const char quote = peek();
  advance();
  std::string result;
  while (true) {
    if (at_end() || is_line_end()) fail_at_place(begin, "a quoted text must end on its line");
    const char c = peek();
    advance();
    if (c == quote) {
      if (quote == '"' || peek() != quote) return result;
      advance();
      result += quote;
    } else if (c == '\\' && quote == '"') {
      append_escape(result);
    } else {
      result += c;
    }
  }
}

void YamlText::append_escape(std::string& into) {
  static constexpr std::string_view kNames = "abtnvfre\"/\\ ", kValues = "\a\b\t\n\v\f\r\x1b\"/\\ ";
  const char name = peek();
  if (const size_t known = kNames.find(name); known != std::string_view::npos && !at_end()) {
    advance();
    into += kValues[known];
    return;
  }
  const size_t digits = name == 'x' ? 2 : name == 'u' ? 4 : name == 'U' ? 8 : 0;
  if (digits == 0) fail("an escape in double quotes that is not read. Use single quotes for text with backslashes");
  const std::string_view code = text_.substr(at_ + 1, digits);
  uint32_t character = 0;
  const auto [stop, error] = std::from_chars(code.data(), code.data() + code.size(), character, 16);
  const bool is_character = error == std::errc{} && code.size() == digits && stop == code.data() + digits && character > 0 &&
                            character <= 0x10FFFF && !(character >= 0xD800 && character <= 0xDFFF);
  if (!is_character) fail("\\{} must be followed by {} hexadecimal digits of a character", std::string_view(&name, 1), digits);
  at_ += 1 + digits;
  append_utf8(into, character);
}

std::string YamlText::plain_text(bool in_flow) {
  const char first = peek();
  const auto refuse = [&](const char* what) {
    fail("{} (a text that begins with '{}' needs quotes)", what, std::string_view(&first, 1));
  };
  switch (first) {
    case '&':
      refuse("anchors are not read");
      break;
    case '*':
      refuse("aliases are not read");
      break;
    case '!':
      refuse("tags are not read");
      break;
    case '|':
    case '>':
      refuse("text over several lines is not read");
      break;
    case '%':
    case '@':
    case '`':
    case ',':
    case ']':
    case '}':
    case '[':
    case '{':
    case '#':
      refuse("expected a value");
      break;
    case '-':
    case '?':
    case ':':
      if (is_blank(peek(1)) || (in_flow && first != '-')) refuse("expected a value");
      break;
    default:
      break;
  }
  constexpr std::string_view kOfFlow = ",[]{}";
  const size_t begin = at_;
  size_t end = at_;
  for (; !at_end() && !is_line_end(); advance()) {
    const char c = peek();
    if (c == '\t') fail("a tab. Use spaces, or put the text into quotes");
    if (c == ':' && (is_blank(peek(1)) || (in_flow && kOfFlow.find(peek(1)) != std::string_view::npos))) break;
    if (c == '#' && at_ > begin && text_[at_ - 1] == ' ') break;
    if (in_flow && kOfFlow.find(c) != std::string_view::npos) break;
    if (in_flow && c == '?') fail("within brackets a text with '?' needs quotes");
    if (c != ' ') end = at_ + 1;
  }
  at_ = end;
  return std::string(text_.substr(begin, end - begin));
}

}  // namespace qlorapp::format
