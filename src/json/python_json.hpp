// SPDX-License-Identifier: Apache-2.0
/// Writes JSON byte for byte as Python's json.dumps does, so that a file of ours and one of transformers or PEFT compare equal.
///
/// Floats are Python's repr: the shortest digits that read back, plain from 1e-4 up to 1e16 (`0.05`, `1.0`), else with an
/// exponent of at least two digits (`1e-05`, `1e+16`); NaN, Infinity and -Infinity as Python writes them.
///
/// Source: CPython's json.encoder and float.__repr__; tests/python/test_quant_state.py compares both live.
#pragma once

#include <string>
#include <string_view>

#include "qlorapp/json/json.hpp"

namespace qlorapp::format {

/// The arguments of json.dumps that occur in files of this field.
struct PythonJsonStyle {
  int indent = -1;           ///< Spaces a level; negative: one line, with ", " and ": ".
  bool sort_keys = false;    ///< By code points, at every level.
  bool ensure_ascii = true;  ///< Everything outside printable ASCII as \uXXXX.
};

/// transformers' config.json and PEFT's adapter_config.json: json.dumps(…, indent=2, sort_keys=True).
inline constexpr PythonJsonStyle kConfigStyle{.indent = 2, .sort_keys = true, .ensure_ascii = true};

/// @throws ValueError if a string is not UTF-8.
[[nodiscard]] std::string dump_python_json(const Json& value, const PythonJsonStyle& style = {});

/// repr(value) of a Python float.
[[nodiscard]] std::string python_float_repr(double value);

/// Appends `text` as a JSON string with its quotes. @throws ValueError if it is not UTF-8.
void append_json_string(std::string& out, std::string_view text, bool ensure_ascii);

}  // namespace qlorapp::format
