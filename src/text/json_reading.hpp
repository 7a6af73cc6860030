// SPDX-License-Identifier: Apache-2.0
/// JSON from files that may be hostile: strict UTF-8, at most 64 levels deep, no key twice in an object; and rows of data in it.
/// Torch-free.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

namespace qlorapp {

constexpr std::size_t kJsonDepth = 64;

/// A row of a data set. Keys keep their order, which chat templates show where they write tools.
using Row = nlohmann::ordered_json;
/// Keys of an object in a row: looking one up is linear.
constexpr std::size_t kMostRowKeys = 1024;
/// Of a row. They bound what a line of 64 MiB takes in memory.
constexpr std::size_t kMostRowValues = std::size_t{1} << 20, kMostRowIds = std::size_t{8} << 20;

/// Where a text begins in its file, from 1; columns are characters.
struct TextPlace {
  int64_t line = 1, column = 1;
};

/// A row's list of ids that are below 2^31: four bytes each, where a JSON value has sixteen.
class PackedIds {
 public:
  explicit PackedIds(std::span<const uint8_t> bytes) : bytes_(bytes) {}
  [[nodiscard]] std::size_t size() const { return bytes_.size() / sizeof(int32_t); }
  int32_t operator[](std::size_t i) const {
    int32_t id = 0;
    std::memcpy(&id, &bytes_[i * sizeof id], sizeof id);
    return id;
  }

 private:
  std::span<const uint8_t> bytes_;
};

/// @throws FormatError "[where] …" for malformed text, NaN, lone surrogates, deep nesting and doubled keys.
[[nodiscard]] nlohmann::json parse_json(std::string_view text, const std::string& where);

/// @param packs_ids  'input_ids', 'labels' and 'attention_mask' of the row become PackedIds where they hold nothing but whole numbers
///                   that fit.
/// @param begin      stands in the message about malformed text, which names line and column of the file.
/// @throws as parse_json(); FormatError for an object with more than kMostRowKeys keys, more than kMostRowValues values or kMostRowIds ids.
[[nodiscard]] Row parse_row(std::string_view text, const std::string& where, bool packs_ids = false, TextPlace begin = {});
/// The same for a text that is not held as a whole: the parser has it twice already, as its token and as the row's value.
/// @param next  returns the next part, which is read before the next call; an empty one at the end.
[[nodiscard]] Row parse_row(const std::function<std::string_view()>& next, const std::string& where, bool packs_ids,
                            TextPlace begin);
/// Absent unless parse_row() packed the list; valid as long as `value`.
[[nodiscard]] std::optional<PackedIds> packed_ids(const Row& value);

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
