// SPDX-License-Identifier: Apache-2.0
/// checkpoint-<step> folders: written beside their place and renamed into it, so that one that has its name is whole.
/// Knows files only; what is in them is the business of train/.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace qlorapp {

/// A folder under construction. Unless commit() is called it vanishes with the object.
class CheckpointWriter {
 public:
  /// @param output_dir  made if missing.  @throws IoError.
  CheckpointWriter(std::string output_dir, int64_t step);
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  /// Where to write the files.
  [[nodiscard]] const std::string& folder() const { return temporary_; }
  /// Renames the folder to checkpoint-<step>; one of that name is replaced only now.  @returns its path.  @throws IoError.
  std::string commit();

 private:
  std::string output_dir_, final_, temporary_;
  bool committed_ = false;
};

/// (step, path) of all checkpoint folders, oldest step first. Ordered by step, never by time stamps.
[[nodiscard]] std::vector<std::pair<int64_t, std::string>> list_checkpoints(const std::string& output_dir);
/// The newest whose trainer_state.json is there, or none.
[[nodiscard]] std::optional<std::string> latest_checkpoint(const std::string& output_dir);
/// Removes the oldest beyond `limit`, never those of `keep` that are there. Call after a commit.
void prune_checkpoints(const std::string& output_dir, int64_t limit, const std::vector<std::string>& keep);
/// Removes what an interrupted save has left.
void remove_stale_checkpoints(const std::string& output_dir);

}  // namespace qlorapp
