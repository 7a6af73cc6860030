// SPDX-License-Identifier: Apache-2.0
/// GGUF files as models. Functions that take a model's folder also take the folder that model_folder() makes for a file.
#pragma once

#include <string>

namespace qlorapp {

/// By its first bytes, or its name; files of a download may have any.
[[nodiscard]] bool is_gguf_file(const std::string& path);

/// A folder with config.json, generation_config.json, tokenizer and chat template of a GGUF file; its weights are read from the file itself. It is
/// in TMPDIR and goes when the process ends; the same file gives the same folder.
/// @param path  a file; a folder comes back as it is.
/// @throws IoError; FormatError by byte and rule for a file that is damaged or hostile, and for a tokenizer that is not known;
///         UnsupportedModel for an architecture that is not computed.
[[nodiscard]] std::string model_folder(const std::string& path);

/// The path or Hub name that the user gave for the model in this folder; the folder itself if none is known. Adapter configs name their base
/// by it.
[[nodiscard]] std::string model_path(const std::string& folder);
/// Of what model_path() gives from now on. Thread-safe.
void set_model_path(const std::string& folder, const std::string& name);

}  // namespace qlorapp
