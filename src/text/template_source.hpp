// SPDX-License-Identifier: Apache-2.0
/// Jinja source as a list of statements in one spelling, to be compared and never run. Torch-free.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace qlorapp {

/// "emit "text"" · "emit expression" · "if condition" · "elif condition" · "else" · "endif" · "for x in y" · "endfor" · "set x = y"
using Statements = std::vector<std::string>;

struct TemplateStatements {
  Statements all;    ///< Without built-in tools, which are never given here.
  Statements plain;  ///< What a conversation without tools can reach.
};

/// White-space control is applied as transformers configures Jinja (trim_blocks, lstrip_blocks), sums are emitted term by term,
/// neighboring texts are joined; x.strip() is x | trim, and the words of an exception are left out.
/// @returns nullopt for source that is no Jinja or does not nest.
[[nodiscard]] std::optional<TemplateStatements> template_statements(std::string_view jinja);

/// Whether a template names a key, as message.key or message['key'] do.
[[nodiscard]] bool names_key(std::string_view jinja, std::string_view key);

}  // namespace qlorapp
