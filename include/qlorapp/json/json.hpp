// SPDX-License-Identifier: Apache-2.0
/// Reads JSON from untrusted files. Sizes are bounded; constructs that JSON readers resolve differently are refused.
///
/// Two readers that resolve a duplicate key differently see two different files, so a duplicate is an error at any level.
/// So are a byte-order mark, a NUL byte, invalid UTF-8, a lone surrogate escape, text behind the value, comments, a number
/// outside the range of a double, and (unless allowed) an integer outside int64 and Python's NaN and Infinity literals.
///
/// Source: RFC 8259; the limits are those of docs/formats/checkpoint.md.
#pragma once

#include <cstddef>
#include <string_view>

#include <nlohmann/json_fwd.hpp>

namespace qlorapp::format {

/// Keeps the order of keys: a file that is read and written again keeps its order.
using Json = nlohmann::ordered_json;

struct JsonLimits {
  size_t max_bytes = size_t{128} << 20;
  size_t max_depth = 64;            ///< Objects and arrays inside each other; the outermost counts as one.
  bool allow_nonfinite = false;     ///< Accept NaN, Infinity and -Infinity, which Python's json writes for such floats.
  bool allow_big_integers = false;  ///< Accept integers outside int64; beyond uint64 they become doubles.
};

/// @param text  One JSON value, whitespace around it allowed.
/// @param where Names the text in errors: the path of its file.
/// @throws FormatError  naming `where` and the byte offset.
[[nodiscard]] Json parse_json(std::string_view text, std::string_view where, const JsonLimits& limits = {});

}  // namespace qlorapp::format
