// SPDX-License-Identifier: Apache-2.0
/// Reads a file of JSON.
#pragma once

#include <string>

#include "qlorapp/json/json.hpp"

namespace qlorapp::files {

/// Reads a whole file and parses it. @throws IoError if it cannot be read, FormatError as format::parse_json().
[[nodiscard]] format::Json read_json_file(const std::string& path, const format::JsonLimits& limits = {});
/// The same for a file of a folder that may come from anywhere. @throws FormatError for a link that leads out of the folder, too.
[[nodiscard]] format::Json read_json_inside(const std::string& path, const format::JsonLimits& limits = {});

}  // namespace qlorapp::files
