// SPDX-License-Identifier: Apache-2.0
/// JSON from files that may be hostile: strict UTF-8, at most 64 levels deep, no key twice in an object; and rows of data in it.
/// Torch-free.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

namespace qlorapp {

constexpr int kJsonDepth = 64;

/// A row of a data set. Keys keep their order, which chat templates show where they write tools.
using Row = nlohmann::ordered_json;
/// Keys of an object in a row: looking one up is linear.
constexpr std::size_t kMostRowKeys = 1024;

/// @throws FormatError "[where] …" for malformed text, NaN, lone surrogates, deep nesting and doubled keys.
[[nodiscard]] nlohmann::json parse_json(std::string_view text, const std::string& where);

/// @throws as parse_json(); FormatError for an object with more than kMostRowKeys keys.
[[nodiscard]] Row parse_row(std::string_view text, const std::string& where);

/// @throws IoError when the file cannot be read, FormatError when it has more than `limit` bytes.
[[nodiscard]] std::string read_file(const std::string& path, size_t limit);
/// The same for a file of a model's folder. @throws FormatError for a link that leads out of it, too.
[[nodiscard]] std::string read_file_inside(const std::string& path, size_t limit);

/// @returns "null", "a number", "a string", …: how an error names what it got.
[[nodiscard]] std::string_view kind_of(const nlohmann::json& value);
[[nodiscard]] std::string_view kind_of(const Row& value);

/// The keys of an object whose values are not null.
[[nodiscard]] std::vector<std::string> keys_of(const Row& row);

/// @throws FormatError "[where] …" if `row` is no object or has no such key.
[[nodiscard]] const Row& require(const Row& row, const std::string& key, const std::string& where);

/// As require(). @throws FormatError if the value is no string.
[[nodiscard]] const std::string& require_text(const Row& row, const std::string& key, const std::string& where);

}  // namespace qlorapp
