// SPDX-License-Identifier: Apache-2.0
/// The known name closest to a misspelled one, for error messages.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace qlorapp {

/// @param most  the largest edit distance that counts; unset: a third of the name's length, plus one.
/// @returns the entry of `known` with the smallest edit distance to `name` (case and - / _ ignored), or an empty view.
[[nodiscard]] std::string_view nearest_name(std::string_view name, std::span<const std::string_view> known,
                                            std::optional<size_t> most = std::nullopt);

/// @returns " Did you mean 'x'?" or an empty string; ready to be put behind a message.
[[nodiscard]] std::string did_you_mean(std::string_view name, std::span<const std::string_view> known,
                                       std::optional<size_t> most = std::nullopt);

}  // namespace qlorapp
