// SPDX-License-Identifier: Apache-2.0
/// Folders in TMPDIR that stand for a file, until the process ends. The same file gives the same folder. Thread-safe.
#pragma once

#include <functional>
#include <string>

namespace qlorapp {

/// @param purpose  tells the folders of one file apart.
/// @param fill     writes into a new folder, which goes if it throws.
/// @throws IoError.
[[nodiscard]] std::string folder_for_file(const std::string& path, const std::string& purpose,
                                          const std::function<void(const std::string& folder)>& fill);

}  // namespace qlorapp
