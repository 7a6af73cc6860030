// SPDX-License-Identifier: Apache-2.0
/// The files beside a model's weights, for folders that are made of folders.
#pragma once

#include <string>

namespace qlorapp {

/// The whole file, up to 1 GiB. @throws IoError; FormatError, also for a link that leads out of its folder.
[[nodiscard]] std::string read_text(const std::string& path);

/// Copies everything beside the weights and config.json that belongs to a model: tokenizer, templates, generation settings, license.
/// @throws IoError.
void copy_model_files(const std::string& from, const std::string& to);

}  // namespace qlorapp
