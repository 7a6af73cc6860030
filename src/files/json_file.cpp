// SPDX-License-Identifier: Apache-2.0
#include "files/json_file.hpp"

#include <nlohmann/json.hpp>

#include "files/file_reader.hpp"

namespace qlorapp::files {

format::Json read_json_inside(const std::string& path, const format::JsonLimits& limits) {
  return format::parse_json(FileReader::open_inside(path).read_all(limits.max_bytes), path, limits);
}

format::Json read_json_file(const std::string& path, const format::JsonLimits& limits) {
  return format::parse_json(FileReader(path).read_all(limits.max_bytes), path, limits);
}

}  // namespace qlorapp::files
