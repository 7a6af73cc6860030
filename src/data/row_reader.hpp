// SPDX-License-Identifier: Apache-2.0
/// The rows of a .jsonl or .json file as text, one by one, with their line numbers. Torch-free.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

namespace qlorapp {

constexpr std::size_t kLargestRow = std::size_t{64} << 20;

/// Calls visit(row, line) for each row: each line that is not blank, or each element when the file is one JSON array.
/// A byte order mark and CR at the end of a line are passed over.
/// @returns the number of blank lines (.jsonl). @throws IoError; FormatError for rows above 64 MiB, arrays that do not close
/// and files of another kind (UTF-16, gzip, parquet).
int64_t for_each_row(const std::string& path, const std::function<void(std::string_view row, int64_t line)>& visit);

}  // namespace qlorapp
