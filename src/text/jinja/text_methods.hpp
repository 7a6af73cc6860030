// SPDX-License-Identifier: Apache-2.0
/// Python's methods of texts. Torch-free.
#pragma once

#include <string>
#include <string_view>

#include "value.hpp"

namespace qlorapp::jinja {

/// text.name as a function; undefined if there is no such method here.
[[nodiscard]] Value text_method(const Value& text, std::string_view name);
/// text.name(…) of a method that is there.
[[nodiscard]] Value call_text_method(const std::string& text, std::string_view name, const Arguments& arguments);

/// @throws Failure for letters beyond ASCII, whose cases are not known here.
[[nodiscard]] std::string lowered(std::string_view text);
[[nodiscard]] std::string uppered(std::string_view text);
/// Jinja's filter `title`, which is not Python's method.
[[nodiscard]] std::string titled(std::string_view text);

}  // namespace qlorapp::jinja
