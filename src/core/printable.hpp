// SPDX-License-Identifier: Apache-2.0
/// A string that came from a file, made safe to stand in one line of an error message.
#pragma once

#include <string>
#include <string_view>

namespace qlorapp {

/// @returns the text between single quotes, with bytes outside printable ASCII as \xNN and everything behind `limit` bytes
///          as an ellipsis: a hostile name can neither forge a second line nor fill a terminal.
[[nodiscard]] std::string printable(std::string_view text, size_t limit = 120);

}  // namespace qlorapp
