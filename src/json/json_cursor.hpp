// SPDX-License-Identifier: Apache-2.0
/// What the two event-driven JSON readers (any JSON; a safetensors header) share: a cursor that knows how far the parser has
/// read, so that an error found in an event can name its byte, and the refusals that the parser itself does not make.
#pragma once

#include <cstddef>
#include <iterator>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "core/printable.hpp"

namespace qlorapp::format {

/// An input iterator over bytes that counts them. The parser reads at most one byte ahead.
class JsonCursor {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  JsonCursor(const char* at, size_t* position) : at_(at), position_(position) {}
  reference operator*() const { return *at_; }
  JsonCursor& operator++() {
    ++at_;
    ++*position_;
    return *this;
  }
  JsonCursor operator++(int) {
    JsonCursor before = *this;
    ++*this;
    return before;
  }
  friend bool operator==(const JsonCursor& a, const JsonCursor& b) { return a.at_ == b.at_; }
  friend bool operator!=(const JsonCursor& a, const JsonCursor& b) { return a.at_ != b.at_; }

  /// Sends the events of `text` to `handler`, which throws on errors; `position` counts the bytes read.
  template <class Handler>
  static void parse(std::string_view text, size_t& position, Handler& handler) {
    nlohmann::json::sax_parse(JsonCursor(text.data(), &position), JsonCursor(text.data() + text.size(), &position), &handler);
  }

 private:
  const char* at_;
  size_t* position_;
};

/// The parser takes a NUL for the end of the text and skips a byte-order mark: bytes behind the first, and a file that
/// Python's json refuses, would pass.
inline void refuse_bytes_outside_json(std::string_view text, std::string_view where) {
  const size_t nul = text.find('\0');
  QLORAPP_CHECK_FORMAT(nul == std::string_view::npos,
                       "[{}] invalid JSON: a NUL byte, at byte {}. The file is damaged or of another kind.", where, nul);
  QLORAPP_CHECK_FORMAT(!text.starts_with("\xef\xbb\xbf"),
                       "[{}] invalid JSON: a byte-order mark, at byte 0. Save the file as UTF-8 without one.", where);
}

/// The parser's own complaint in one line of ours.
[[noreturn]] inline void fail_parse(std::string_view where, size_t position, const nlohmann::detail::exception& error) {
  std::string_view reason = error.what();
  const size_t prefix = reason.find("] ");  // [json.exception.parse_error.101]
  if (prefix != std::string_view::npos) reason.remove_prefix(prefix + 2);
  const std::string shown = printable(reason, 240);
  throw FormatError(message("[{}] invalid JSON: {}, at byte {}. The file is damaged or of another kind.", where,
                            std::string_view(shown).substr(1, shown.size() - 2), position));
}

}  // namespace qlorapp::format
