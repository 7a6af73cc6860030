// SPDX-License-Identifier: Apache-2.0
/// Adapters in GGUF files, as llama.cpp's --lora has them, as PEFT folders.
#pragma once

#include <string>

#include "qlorapp/format/model_config.hpp"

namespace qlorapp {

/// Whether a GGUF file holds an adapter. @throws IoError, FormatError as GgufFile.
[[nodiscard]] bool is_gguf_adapter(const std::string& path);

/// A PEFT folder with the file's matrices, in TMPDIR until the process ends.
/// @param base  of the model that it is to lie over.
/// @throws FormatError naming the tensor that has no place in the model, another shape, or half of a pair; IoError.
[[nodiscard]] std::string adapter_folder(const std::string& path, const format::ModelConfig& base);

}  // namespace qlorapp
