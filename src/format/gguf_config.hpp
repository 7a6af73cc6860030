// SPDX-License-Identifier: Apache-2.0
/// The config.json of a model in a GGUF file: the family whose row names the file's architecture, as llama.cpp computes it.
#pragma once

#include <string>

#include "gguf.hpp"

namespace qlorapp::format {

/// JSON. Windows are those that llama.cpp computes, and divisors of rope frequencies are the file's own (longrope).
/// @throws UnsupportedModel for an architecture that no family has; FormatError naming the key that is missing or has another type.
[[nodiscard]] std::string gguf_config_json(const GgufFile& file);

}  // namespace qlorapp::format
