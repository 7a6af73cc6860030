// SPDX-License-Identifier: Apache-2.0
/// A config field that may hold any JSON value: an object of keyword arguments, a list, a string or nothing.
///
/// transformers has such fields (lr_scheduler_kwargs, fsdp_config, debug …). The text keeps this header free of a JSON library;
/// its users parse and check the value (format/config_json.hpp reads and writes the field itself).
#pragma once

#include <string>

namespace qlorapp {

struct FreeForm {
  std::string json = "null";  ///< One JSON value.

  [[nodiscard]] bool is_null() const { return json == "null"; }
  friend bool operator==(const FreeForm&, const FreeForm&) = default;
};

}  // namespace qlorapp
