// SPDX-License-Identifier: Apache-2.0
/// Shapes of published models by name, so that a plan can be asked for before anything is downloaded.
#pragma once

#include <string>

#include "qlorapp/format/model_config.hpp"

namespace qlorapp {

/// @param text  a folder with a config.json, whose weights are looked at if they are there (format/model_folder.hpp), a config.json, or a known name in any case ("llama-3-8b").
/// @throws ValueError naming those there are if it is none of them; IoError, FormatError as load_model_config.
[[nodiscard]] format::ModelConfig find_model_config(const std::string& text);

}  // namespace qlorapp
