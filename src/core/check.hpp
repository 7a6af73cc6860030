// SPDX-License-Identifier: Apache-2.0
/// Messages, formatted by fmt, and the checks that throw them. Torch-free.
///
/// Format strings are checked at compile time. Only fmt's light header is included here: the formatting itself is compiled once.
#pragma once

#include <concepts>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include <fmt/base.h>

#include "qlorapp/core/error.hpp"

namespace qlorapp {

namespace detail {

template <class T>
concept List = !std::convertible_to<const T&, std::string_view> && requires(const T& list) {
  list.begin();
  list.end();
};

[[nodiscard]] std::string format_text(fmt::string_view text, fmt::format_args arguments);

}  // namespace detail

template <class Range>
[[nodiscard]] std::string joined(const Range& range);

namespace detail {

template <class T>
decltype(auto) shown(T& value) {
  if constexpr (List<std::remove_cv_t<T>>) {
    return joined(value);
  } else {
    return (value);
  }
}

template <class... Args>
[[nodiscard]] std::string format_shown(fmt::string_view text, Args&&... args) {
  return format_text(text, fmt::vargs<Args...>{{args...}});
}

}  // namespace detail

/// A format string, checked at compile time against its arguments.
template <class... Args>
using Format = fmt::format_string<decltype(detail::shown(std::declval<Args&>()))...>;

/// fmt::format: arguments are numbers, bools, characters and text, and containers of those, which are shown as [a, b, c].
template <class... Args>
[[nodiscard]] std::string message(Format<Args...> text, Args&&... args) {
  return detail::format_shown<decltype(detail::shown(args))...>(text.get(), detail::shown(args)...);
}

/// "[a, b, c]" of a container.
template <class Range>
std::string joined(const Range& range) {
  std::string out = "[";
  bool first = true;
  for (const auto& item : range) {
    if (!first) out += ", ";
    first = false;
    out += message("{}", item);
  }
  return out + ']';
}

}  // namespace qlorapp

/// Throws ValueError with the formatted message unless the condition holds. The arguments are evaluated only then.
#define QLORAPP_CHECK_VALUE(condition, ...)                                         \
  do {                                                                              \
    if (!(condition)) throw ::qlorapp::ValueError(::qlorapp::message(__VA_ARGS__)); \
  } while (false)

/// As QLORAPP_CHECK_VALUE, for an object of the wrong kind.
#define QLORAPP_CHECK_TYPE(condition, ...)                                         \
  do {                                                                             \
    if (!(condition)) throw ::qlorapp::TypeError(::qlorapp::message(__VA_ARGS__)); \
  } while (false)

/// As QLORAPP_CHECK_VALUE, for a file that breaks its format.
#define QLORAPP_CHECK_FORMAT(condition, ...)                                         \
  do {                                                                               \
    if (!(condition)) throw ::qlorapp::FormatError(::qlorapp::message(__VA_ARGS__)); \
  } while (false)
