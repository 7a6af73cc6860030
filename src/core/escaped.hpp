// SPDX-License-Identifier: Apache-2.0
/// Text that may come from a file, made safe to print: a terminal obeys control characters. Torch-free.
#pragma once

#include <string>
#include <string_view>

namespace qlorapp {

/// Writes as \xNN and \uNNNN: control characters (C0 but for tab and line feed, DEL, C1), the characters that reverse the direction of text
/// or end a line (U+202A–202E, U+2066–2069, U+2028, U+2029), and bytes that are no UTF-8. The rest stays as it is.
[[nodiscard]] std::string escaped(std::string_view text);
/// The same, and a line feed as \n: an error or warning is one line.
[[nodiscard]] std::string escaped_line(std::string_view text);

}  // namespace qlorapp
