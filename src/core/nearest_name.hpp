// SPDX-License-Identifier: Apache-2.0
/// The known name closest to a misspelled one, for error messages.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace qlorapp {

/// @returns the entry of `known` with the smallest edit distance to `name` (case and - / _ ignored), or an empty view if
///          none is closer than a third of its length plus one.
[[nodiscard]] std::string_view nearest_name(std::string_view name, std::span<const std::string_view> known);

/// @returns " Did you mean 'x'?" or an empty string; ready to be put behind a message.
[[nodiscard]] std::string did_you_mean(std::string_view name, std::span<const std::string_view> known);

}  // namespace qlorapp
