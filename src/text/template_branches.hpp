// SPDX-License-Identifier: Apache-2.0
/// Which branches of a template a conversation can take. Torch-free.
#pragma once

#include <optional>

#include "template_source.hpp"

namespace qlorapp {

/// Without the branches of built-in tools, which are never given here. @returns nullopt for blocks that do not nest.
[[nodiscard]] std::optional<Statements> without_builtin_tools(Statements statements);

/// Without the branches that only a conversation with tools takes. @returns nullopt for blocks that do not nest.
[[nodiscard]] std::optional<Statements> without_tools(Statements statements);

}  // namespace qlorapp
