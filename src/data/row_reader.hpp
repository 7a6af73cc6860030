// SPDX-License-Identifier: Apache-2.0
/// The rows of a data file as JSON objects, one by one, with their line numbers. Torch-free.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "qlorapp/data/dataset.hpp"
#include "text/json_reading.hpp"

namespace qlorapp {

constexpr std::size_t kLargestRow = std::size_t{64} << 20;

/// How a file was read.
struct RowFile {
  FileFormat format = FileFormat::kJson;
  int64_t blank_lines = 0;  ///< Passed over.
};

/// The format that a file's name says, `.gz` at its end apart: .csv, .tsv (.tab), .txt; JSON otherwise.
[[nodiscard]] FileFormat format_of_name(const std::string& path);

/// Calls visit(row, line) for each row:
///   JSON         each line that is not blank, or each element if the file is one array
///   CSV and TSV  each record behind the header as {"column": "field", …}
///   lines        each line that is not blank as {`text_field`: "the line"}
///   paragraphs   lines up to the next blank one, joined by line feeds, in the same form
/// A gzip file is unpacked, whatever its name. A byte order mark and CR at the end of a line are skipped.
/// @param format  kByName: as format_of_name() says.
/// @throws IoError; FormatError "[file:line] …" for rows above 64 MiB, malformed ones, and files of another kind (UTF-16, parquet,
/// archives).
RowFile for_each_row(const std::string& path, FileFormat format, const std::string& text_field,
                     const std::function<void(Row row, int64_t line)>& visit);

}  // namespace qlorapp
