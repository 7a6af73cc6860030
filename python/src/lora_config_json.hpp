// SPDX-License-Identifier: Apache-2.0
/// LoraConfig from the JSON that Python's dataclass makes of itself.
#pragma once

#include <string>

#include "qlorapp/adapters/lora_config.hpp"

namespace qlorapp::python {

/// @throws FormatError naming the key.
[[nodiscard]] LoraConfig lora_config_from(const std::string& json);

}  // namespace qlorapp::python
