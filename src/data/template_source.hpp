// SPDX-License-Identifier: Apache-2.0
/// Jinja source as a list of statements in one spelling, to be compared and never run. Torch-free.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace qlorapp {

/// "emit "text"" · "emit expression" · "if condition" · "elif condition" · "else" · "endif" · "for x in y" · "endfor" · "set x
/// = y". White-space control is applied as transformers configures Jinja (trim_blocks, lstrip_blocks), sums are emitted term by
/// term, neighbouring texts are joined, and branches that a conversation without tools never takes are left out.
/// @returns nullopt for a statement of another kind and for source that does not nest.
[[nodiscard]] std::optional<std::vector<std::string>> template_statements(std::string_view jinja);

}  // namespace qlorapp
