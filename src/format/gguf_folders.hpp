// SPDX-License-Identifier: Apache-2.0
/// Folders that stand for a GGUF file in this process: they hold what a checkpoint has beside its weights (io/gguf_folder.cpp writes it), and
/// TensorFiles finds the weights in the file. No file says so, so none can lead a reader elsewhere. Thread-safe.
#pragma once

#include <string>

namespace qlorapp::format {

void set_gguf_of(const std::string& folder, const std::string& file);
/// The file that a folder stands for, or empty.
[[nodiscard]] std::string gguf_of(const std::string& folder);

}  // namespace qlorapp::format
