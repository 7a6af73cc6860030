// SPDX-License-Identifier: Apache-2.0
/// Errors that a user can act on, and the checks that throw them. Torch-free; everybody may include it.
///
/// Grammar of a message: `[where] rule; got value. What to do.` — `where` is an operator, a file, an option or a key.
/// Checks stand at the boundary, once; what lies below trusts its caller. The library never prints and never exits.
#pragma once

#include <charconv>
#include <concepts>
#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

namespace qlorapp {

/// The caller's mistake: a value outside its range, an unknown option. Python: ValueError. Command line: exit code 2.
class ValueError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

/// The caller's mistake: a thing of the wrong kind. Python: TypeError. Command line: exit code 2.
class TypeError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

/// A file that breaks its format: truncated, hostile, or of another kind. The message names the file.
/// Python: qlorapp.FormatError, a ValueError. Command line: exit code 2.
class FormatError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

/// The operating system refused: no such file, no space, no permission. Python: OSError. Command line: exit code 2.
class IoError : public std::runtime_error {
 public:
  IoError(const std::string& message, int error_number) : std::runtime_error(message), errno_(error_number) {}
  [[nodiscard]] int error_number() const noexcept { return errno_; }

 private:
  int errno_;
};

/// Of an error's message: torch puts what is for programmers behind it.
[[nodiscard]] inline std::string first_line(const std::exception& error) {
  const std::string_view text = error.what();
  return std::string(text.substr(0, text.find('\n')));
}

namespace detail {

inline void append(std::string& out, std::string_view text) { out += text; }
inline void append(std::string& out, char c) { out += c; }
template <std::same_as<bool> Bool>  // a template, or every string literal would turn into a bool
void append(std::string& out, Bool value) {
  out += value ? "true" : "false";
}
template <class Number>
requires(std::is_arithmetic_v<Number> && !std::same_as<Number, bool> && !std::same_as<Number, char>) void append(std::string& out,
                                                                                                                 Number value) {
  char buffer[64];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, value).ptr;
  out.append(buffer, end);
}
/// Anything that a container of numbers or strings is: printed as [a, b, c].
template <class Range>
requires(!std::convertible_to<Range, std::string_view> && requires(const Range& r) {
  r.begin();
  r.end();
}) void append(std::string& out, const Range& range) {
  out += '[';
  bool first = true;
  for (const auto& item : range) {
    if (!first) out += ", ";
    first = false;
    append(out, item);
  }
  out += ']';
}

}  // namespace detail

/// Joins its arguments into one string: text, numbers (shortest form that reads back), bools, containers of those.
template <class... Parts>
[[nodiscard]] std::string concat(const Parts&... parts) {
  std::string out;
  (detail::append(out, parts), ...);
  return out;
}

}  // namespace qlorapp

/// Throws ValueError with the joined parts unless the condition holds. The parts are evaluated only on failure.
#define QLORAPP_CHECK_VALUE(condition, ...)                                        \
  do {                                                                             \
    if (!(condition)) throw ::qlorapp::ValueError(::qlorapp::concat(__VA_ARGS__)); \
  } while (false)

/// As QLORAPP_CHECK_VALUE, for a thing of the wrong kind.
#define QLORAPP_CHECK_TYPE(condition, ...)                                        \
  do {                                                                            \
    if (!(condition)) throw ::qlorapp::TypeError(::qlorapp::concat(__VA_ARGS__)); \
  } while (false)

/// As QLORAPP_CHECK_VALUE, for a file that breaks its format.
#define QLORAPP_CHECK_FORMAT(condition, ...)                                        \
  do {                                                                              \
    if (!(condition)) throw ::qlorapp::FormatError(::qlorapp::concat(__VA_ARGS__)); \
  } while (false)
