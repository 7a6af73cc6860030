// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cctype>

#include "core/check.hpp"
#include "syntax.hpp"
#include "text/unicode.hpp"

namespace qlorapp::jinja {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool begins_name(char c) { return std::isalpha(static_cast<unsigned char>(c)) != 0 || c == '_' || (c & 0x80) != 0; }
bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == '\v' || c == '\f'; }

class Lexer {
 public:
  Lexer(std::string source, const std::string& where) : source_(std::move(source)), where_(where) {}

  std::vector<Token> run() {
    while (at_ < source_.size()) {
      read_text();
      if (at_ < source_.size()) read_tag();
    }
    out_.push_back({TokenKind::kEnd, "", line_});
    return std::move(out_);
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw FormatError(
        message("[{}] line {}: the chat template must be Jinja; {}. Copy the file from the model again.", where_, line_, what));
  }
  [[nodiscard]] bool sees(std::string_view text) const { return std::string_view(source_).substr(at_).starts_with(text); }
  void advance(std::size_t bytes) {
    line_ += static_cast<int>(std::count(source_.begin() + static_cast<std::ptrdiff_t>(at_),
                                         source_.begin() + static_cast<std::ptrdiff_t>(at_ + bytes), '\n'));
    at_ += bytes;
  }

  /// Text up to the next tag, without what its white-space control and that of the tag before it take away.
  void read_text() {
    std::size_t end = at_;
    while (end < source_.size()) {
      end = std::min(source_.find('{', end), source_.size());
      if (end + 1 < source_.size() && (source_[end + 1] == '{' || source_[end + 1] == '%' || source_[end + 1] == '#')) break;
      if (end < source_.size()) ++end;
    }
    std::string_view text = std::string_view(source_).substr(at_, end - at_);
    if (strip_next_) {
      while (!text.empty() && is_blank(text.front())) text.remove_prefix(1);
    } else if (trim_next_ && text.starts_with('\n')) {
      text.remove_prefix(1);
    }
    if (end < source_.size()) text = before_tag(text, end);
    if (!text.empty()) out_.push_back({TokenKind::kText, std::string(text), line_});
    advance(end - at_);
    strip_next_ = trim_next_ = false;
  }

  [[nodiscard]] std::string_view before_tag(std::string_view text, std::size_t tag) const {
    const char control = tag + 2 < source_.size() ? source_[tag + 2] : ' ';
    if (control == '-') {
      while (!text.empty() && is_blank(text.back())) text.remove_suffix(1);
    } else if (control != '+' && source_[tag + 1] != '{') {  // lstrip_blocks
      std::size_t kept = text.size();
      while (kept > 0 && is_blank(text[kept - 1]) && text[kept - 1] != '\n') --kept;
      const bool first = kept == 0 && (tag == text.size() || source_[tag - text.size() - 1] == '\n');
      if (kept > 0 ? text[kept - 1] == '\n' : first) text = text.substr(0, kept);
    }
    return text;
  }

  void end_tag(bool strips, bool trims) {
    strip_next_ = strips;
    trim_next_ = trims && !strips;
  }

  void read_tag() {
    const char kind = source_[at_ + 1];
    if (kind == '#') {
      const std::size_t end = source_.find("#}", at_ + 2);
      if (end == std::string::npos) fail("got a comment without its end");
      const bool strips = source_[end - 1] == '-' && end > at_ + 2, keeps = source_[end - 1] == '+' && end > at_ + 2;
      advance(end + 2 - at_);
      return end_tag(strips, !keeps);
    }
    advance(2);
    if (at_ < source_.size() && (source_[at_] == '-' || source_[at_] == '+')) advance(1);
    if (kind == '%' && read_raw()) return;
    const bool block = kind == '%';
    out_.push_back({block ? TokenKind::kBlockBegin : TokenKind::kVariableBegin, "", line_});
    const std::string_view close = block ? "%}" : "}}";
    std::string open;  // brackets
    for (;;) {
      while (at_ < source_.size() && is_blank(source_[at_])) advance(1);
      if (at_ >= source_.size()) fail("got a tag without its end");
      const bool strips = sees(block ? "-%}" : "-}}"), keeps = block && sees("+%}");
      if (open.empty() && (strips || keeps || sees(close))) {
        advance(strips || keeps ? 3 : 2);
        out_.push_back({block ? TokenKind::kBlockEnd : TokenKind::kVariableEnd, "", line_});
        return end_tag(strips, block && !keeps);
      }
      read_token(open);
    }
  }

  /// {% raw %} … {% endraw %}, if that begins here.
  bool read_raw() {
    const auto word = [&](std::size_t from, std::string_view name, std::size_t& end, bool& strips) {
      while (from < source_.size() && is_blank(source_[from])) ++from;
      if (!std::string_view(source_).substr(from).starts_with(name)) return false;
      from += name.size();
      while (from < source_.size() && is_blank(source_[from])) ++from;
      strips = from < source_.size() && source_[from] == '-';
      if (strips || (from < source_.size() && source_[from] == '+')) ++from;
      end = from + 2;
      return std::string_view(source_).substr(from).starts_with("%}");
    };
    std::size_t begin = 0, end = 0;
    bool strips = false, strips_behind = false;
    if (!word(at_, "raw", begin, strips)) return false;
    std::size_t tag = begin;
    for (;; tag += 2) {
      tag = source_.find("{%", tag);
      if (tag == std::string::npos) fail("got {% raw %} without its end");
      const std::size_t from = tag + 2 + (tag + 2 < source_.size() && (source_[tag + 2] == '-' || source_[tag + 2] == '+') ? 1 : 0);
      if (word(from, "endraw", end, strips_behind)) break;
    }
    std::string_view text = std::string_view(source_).substr(begin, tag - begin);
    if (strips) {
      while (!text.empty() && is_blank(text.front())) text.remove_prefix(1);
    } else if (text.starts_with('\n')) {
      text.remove_prefix(1);
    }
    text = before_tag(text, tag);
    if (!text.empty()) out_.push_back({TokenKind::kText, std::string(text), line_});
    advance(end - at_);
    end_tag(strips_behind, true);
    return true;
  }

  void read_token(std::string& open) {
    const char c = source_[at_];
    const int line = line_;
    if (c == '\'' || c == '"') {
      out_.push_back({TokenKind::kString, read_string(c), line});
    } else if (begins_name(c)) {
      std::size_t end = at_;
      while (end < source_.size() && (begins_name(source_[end]) || is_digit(source_[end]))) ++end;
      out_.push_back({TokenKind::kName, source_.substr(at_, end - at_), line});
      advance(end - at_);
    } else if (is_digit(c)) {
      read_number();
    } else {
      constexpr std::array<std::string_view, 27> kOperators{"//", "**", "==", "!=", ">=", "<=", "+", "-", "/",
                                                            "*",  "%",  "~",  "[",  "]",  "(",  ")", "{", "}",
                                                            ">",  "<",  "=",  ".",  ":",  "|",  ",", ";", "!"};
      const auto* const found =
          std::find_if(kOperators.begin(), kOperators.end(), [&](std::string_view text) { return sees(text); });
      if (found == kOperators.end() || *found == "!")
        fail(message("got the character '{}'",
                     std::string_view(source_).substr(at_, unicode::length_at(std::string_view(source_).substr(at_)))));
      if (*found == "(" || *found == "[" || *found == "{") open += *found == "(" ? ')' : *found == "[" ? ']' : '}';
      if (*found == ")" || *found == "]" || *found == "}") {
        if (open.empty() || open.back() != found->front()) fail(message("got '{}' that nothing opened", *found));
        open.pop_back();
      }
      out_.push_back({TokenKind::kOperator, std::string(*found), line});
      advance(found->size());
    }
  }

  void read_number() {
    std::size_t end = at_;
    const auto digits = [&] {
      while (end < source_.size() &&
             (is_digit(source_[end]) || (source_[end] == '_' && end + 1 < source_.size() && is_digit(source_[end + 1]))))
        ++end;
    };
    digits();
    bool real = false;
    if (end + 1 < source_.size() && source_[end] == '.' && is_digit(source_[end + 1])) {
      real = true;
      ++end;
      digits();
    }
    if (end < source_.size() && (source_[end] == 'e' || source_[end] == 'E')) {
      const std::size_t sign = end + 1 < source_.size() && (source_[end + 1] == '+' || source_[end + 1] == '-') ? 2 : 1;
      if (end + sign < source_.size() && is_digit(source_[end + sign])) {
        real = true;
        end += sign;
        digits();
      }
    }
    if (!real && end == at_ + 1 && source_[at_] == '0' && end < source_.size() &&
        std::isalpha(static_cast<unsigned char>(source_[end])) != 0)
      throw FormatError(message(
          "[{}] line {}: the chat template uses a number of another base than 10, which is not computed here. Write it in base 10.",
          where_, line_));
    std::string text = source_.substr(at_, end - at_);
    std::erase(text, '_');
    out_.push_back({real ? TokenKind::kFloat : TokenKind::kInteger, std::move(text), line_});
    advance(end - at_);
  }

  std::string read_string(char quote) {
    advance(1);
    std::string out;
    for (;;) {
      if (at_ >= source_.size()) fail("got a string without its end");
      const char c = source_[at_];
      if (c == quote) break;
      if (c != '\\') {
        out += c;
        advance(1);
        continue;
      }
      if (at_ + 1 >= source_.size()) fail("got a string without its end");
      read_escape(out);
    }
    advance(1);
    return out;
  }

  void read_escape(std::string& out) {
    const char c = source_[at_ + 1];
    constexpr std::string_view kNames = "\\'\"abfnrtv", kValues = "\\'\"\a\b\f\n\r\t\v";
    const std::size_t hex = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
    if (const std::size_t known = kNames.find(c); known != std::string_view::npos) {
      out += kValues[known];
      advance(2);
    } else if (c == '\n') {
      advance(2);
    } else if (hex > 0 || (c >= '0' && c <= '7')) {
      std::size_t begin = at_ + (hex > 0 ? 2 : 1), end = begin;
      uint32_t value = 0;
      while (
          end < source_.size() && end - begin < (hex > 0 ? hex : 3) &&
          (hex > 0 ? std::isxdigit(static_cast<unsigned char>(source_[end])) != 0 : source_[end] >= '0' && source_[end] <= '7')) {
        value = value * (hex > 0 ? 16 : 8) +
                static_cast<uint32_t>(is_digit(source_[end]) ? source_[end] - '0' : (source_[end] | 0x20) - 'a' + 10);
        ++end;
      }
      if ((hex > 0 && end - begin != hex) || value > 0x10ffff || (value >= 0xd800 && value < 0xe000))
        fail("got a string with an escape that is no character");
      unicode::append_utf8(out, value);
      advance(end - at_);
    } else if (c == 'N') {
      throw FormatError(
          message("[{}] line {}: the chat template uses a character by its name, which is not computed here. Write the character.",
                  where_, line_));
    } else {  // as it stands
      out += '\\';
      advance(1);
    }
  }

  std::string source_;
  const std::string& where_;
  std::size_t at_ = 0;
  int line_ = 1;
  bool strip_next_ = false, trim_next_ = false;
  std::vector<Token> out_;
};

}  // namespace

std::vector<Token> tokens_of(std::string_view source, const std::string& where) {
  std::string lines;  // with one kind of line ends, and without the last
  for (std::size_t i = 0; i < source.size(); ++i) {
    if (source[i] == '\r' && i + 1 < source.size() && source[i + 1] == '\n') continue;
    lines += source[i] == '\r' ? '\n' : source[i];
  }
  if (lines.ends_with('\n')) lines.pop_back();
  QLORAPP_CHECK_FORMAT(unicode::first_invalid_utf8(lines) == std::string_view::npos,
                       "[{}] the chat template must be UTF-8; it is not. Copy the file from the model again.", where);
  return Lexer(std::move(lines), where).run();
}

}  // namespace qlorapp::jinja
