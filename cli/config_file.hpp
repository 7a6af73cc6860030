// SPDX-License-Identifier: Apache-2.0
/// The file of `--config`: JSON, or YAML if its name ends in .yaml or .yml.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "format/yaml.hpp"

namespace qlorapp::cli {

struct CommandOption;

/// One key of the file.
struct ConfigEntry {
  std::string key, file;
  std::string place;      ///< "file", or "file, line 3" for YAML; for errors.
  format::Json value;     ///< Of JSON.
  format::YamlNode node;  ///< Of YAML.
  bool is_yaml = false;

  /// Reads the value by the option's type. YAML's text without quotes is read as on the command line: `1e-4` is a number
  /// for a rate and text for a name, `no` is false for a switch and "no" for a strategy. A missing value, ~ and null are null.
  /// @throws FormatError naming the place.
  [[nodiscard]] format::Json value_for(const CommandOption& option) const;
};

/// @param command  names the reader in errors.
/// @throws FormatError naming the place; IoError.
[[nodiscard]] std::vector<ConfigEntry> read_config_file(const std::string& file, const std::string& command);

}  // namespace qlorapp::cli
