// SPDX-License-Identifier: Apache-2.0
/// Names on the Hugging Face Hub, and rows in parquet: through Python's packages where the command was started by `python -m qlorapp`
/// (python/qlorapp/hf/hub_service.py).
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace qlorapp::cli {

/// "org/name", which is no file or folder here.
[[nodiscard]] bool is_hub_name(const std::string& text);

/// The folder of a model in huggingface_hub's cache, downloaded if need be. HF_HUB_OFFLINE=1: what is there.
/// @param what  "model", or "config" for its config.json alone.  @param revision  empty: the newest.
/// @throws ValueError with the way to download it by hand where there is no Python; with its message where it fails.
[[nodiscard]] std::string hub_folder(const std::string& name, std::string_view what, const std::string& revision);

enum class Split { kTrain, kEval };

/// The files of rows that a name stands for: those of a dataset on the hub, a parquet file as JSON lines, or the file itself. Files that are made
/// here go with the process.
/// @param split  of a dataset; one whose files name no split is for training as a whole.
/// @throws as hub_folder.
[[nodiscard]] std::vector<std::string> row_files(const std::string& name, Split split);
/// Removes a file that row_files() made. Others stay.
void remove_made(const std::string& file);

}  // namespace qlorapp::cli
