// SPDX-License-Identifier: Apache-2.0
/// The characters of a YAML text, for its parser (yaml.cpp): a cursor that knows line and column, blanks and comments, and scalars.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "core/check.hpp"

namespace qlorapp::format {

struct YamlPlace {
  size_t line = 1, column = 1;
};

class YamlText {
 public:
  /// @throws FormatError for what is no UTF-8, and for characters that YAML does not allow or that some readers take for line ends.
  YamlText(std::string_view text, std::string_view where);

 protected:
  [[nodiscard]] bool at_end() const { return at_ == text_.size(); }
  /// The character here; NUL at the end.
  [[nodiscard]] char peek(size_t ahead = 0) const { return at_ + ahead < text_.size() ? text_[at_ + ahead] : '\0'; }
  void advance() { ++at_; }
  /// From 0, in bytes: what counts for indentation, which is made of spaces.
  [[nodiscard]] int64_t column() const { return static_cast<int64_t>(at_ - line_begin_); }
  [[nodiscard]] YamlPlace place() const;

  /// This character with a blank, a line's end or nothing behind it.
  [[nodiscard]] bool is_indicator(char c) const { return peek() == c && is_blank(peek(1)); }
  [[nodiscard]] bool is_colon() const { return is_indicator(':'); }
  /// Something other than a comment stands here, before the line ends.
  [[nodiscard]] bool in_line() const {
    return !at_end() && !is_line_end() && !(peek() == '#' && at_ > 0 && is_blank(text_[at_ - 1]));
  }

  void skip_spaces();
  /// Over blanks, comments and line ends. @throws FormatError for tabs, and for a second document.
  void skip_to_content();
  /// The same within brackets. Lines must be deeper than `parent`, a column.
  void skip_in_flow(int64_t parent);
  /// Over "---" and the rest of its line, if it is here.
  void begin_document();
  /// A value is read: nothing but a comment may follow on its line.
  void end_line();

  [[nodiscard]] std::string quoted_text();
  [[nodiscard]] std::string plain_text(bool in_flow);

  template <class... Args>
  [[noreturn]] void fail(Format<Args...> text, Args&&... args) const {
    fail_at_place(place(), message(text, std::forward<Args>(args)...));
  }
  [[noreturn]] void fail_at_place(YamlPlace place, const std::string& reason) const;

 private:
  /// NUL is the end of the text.
  [[nodiscard]] static bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == '\0'; }
  [[nodiscard]] bool is_line_end() const { return peek() == '\n' || peek() == '\r'; }
  void next_line();
  void check_characters();
  /// Behind a backslash in double quotes.
  void append_escape(std::string& into);

  std::string_view text_, where_;
  size_t at_ = 0, line_ = 1, line_begin_ = 0;
  bool has_content_ = false;  ///< "---" may not come any more.
};

}  // namespace qlorapp::format
