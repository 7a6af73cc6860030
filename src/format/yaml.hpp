// SPDX-License-Identifier: Apache-2.0
/// Reads a strict subset of YAML: the part that configuration files use and on which YAML 1.1, YAML 1.2 and PyYAML agree.
///
/// Mappings and lists in block and flow form, one-line scalars without quotes or in single or double quotes, comments, and one `---` before
/// the content. Everything else is refused with line and column: anchors, aliases, tags, block scalars, complex keys, directives, several
/// documents, merge keys, duplicate keys, tabs outside quotes and comments, scalars over several lines, `{a}`, `[a: 1]`.
///
/// A scalar without quotes has no type of its own: the option that it is given to decides (cli/config_file.hpp). untyped_json() is for
/// values without a type.
///
/// Source: YAML 1.2.2; PyYAML 6.0, with which tests/python/test_yaml.py compares.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "qlorapp/json/json.hpp"

namespace qlorapp::format {

struct YamlKey;

struct YamlNode {
  enum class Kind { kPlain, kQuoted, kList, kMapping } kind = Kind::kPlain;
  std::string text = {};             ///< Of a scalar; empty for a missing value.
  std::vector<YamlKey> keys = {};    ///< Of a mapping, in order; as many as items.
  std::vector<YamlNode> items = {};  ///< Of a list or a mapping.
  size_t line = 0, column = 0;       ///< From 1, in characters.

  [[nodiscard]] bool is_scalar() const { return kind == Kind::kPlain || kind == Kind::kQuoted; }
  /// Without quotes: nothing, ~, null, Null or NULL.
  [[nodiscard]] bool is_null() const;
};

struct YamlKey {
  std::string text;
  size_t line = 0, column = 0;
};

/// @param text  UTF-8; a byte-order mark is skipped. At most 1 MiB.
/// @param where  Names the text in errors: the path of its file.
/// @returns the root. An empty text is a null.
/// @throws FormatError "[where] line L, column C: …".
[[nodiscard]] YamlNode parse_yaml(std::string_view text, std::string_view where);

/// Whether a plain scalar is a decimal number: 1, -2, +3, 0.5, .5, 5., 1e-4. Not 010, 0x10, 1_000, .inf or inf.
[[nodiscard]] bool is_yaml_number(std::string_view text);

/// A value without a declared type: null, true, yes, on and their opposites, decimal numbers (1e-4 too), otherwise text.
/// @throws FormatError for a plain scalar that readers of YAML resolve differently, such as 010, 0x10, 1_000, 1:30, .inf, 2024-01-31.
[[nodiscard]] Json untyped_json(const YamlNode& node, std::string_view where);

}  // namespace qlorapp::format
