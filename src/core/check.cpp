// SPDX-License-Identifier: Apache-2.0
#include "core/check.hpp"

#include <fmt/format.h>

namespace qlorapp::detail {

std::string format_text(fmt::string_view text, fmt::format_args arguments) { return fmt::vformat(text, arguments); }

}  // namespace qlorapp::detail
