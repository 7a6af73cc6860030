// SPDX-License-Identifier: Apache-2.0
/// The output folder of a run and the checkpoint-<step> folders in it. A checkpoint is written beside its place, described by a manifest,
/// and renamed into it, so that one that has its name is whole. Knows files only; what is in them is the business of train/.
///
/// Source: the protocol and its reasons are in docs/reliability.md.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "files/folder_lock.hpp"
#include "files/manifest.hpp"

namespace qlorapp {

/// An output folder that this program alone writes into. It has the id of the run, which each checkpoint carries: the checkpoints of an
/// earlier run in the same folder are kept, and are neither resumed from nor removed unless they are named.
class RunFolder {
 public:
  /// Locks the folder, puts back a checkpoint whose replacement was interrupted, and removes what interrupted saves have left.
  /// @throws IoError if another program holds it, or if the system refuses.
  explicit RunFolder(std::string path);
  /// Releases the lock: nothing can be written any more.
  void close() { lock_.reset(); }

  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] const std::string& run_id() const { return run_id_; }

  /// A new run: draws its id and writes it to run.json. Logs a warning if checkpoints of an earlier run are there.
  void begin();
  /// The run of this checkpoint, which may lie in another folder, goes on here. It gets an id of its own if it leaves the path of that run:
  /// newer checkpoints of it are here, or something was changed.
  void go_on_from(const std::string& checkpoint, bool changed);
  /// Neither was called yet.
  [[nodiscard]] bool is_new() const { return run_id_.empty(); }

  /// Whether a checkpoint is there and of this run.
  [[nodiscard]] bool owns(const std::string& checkpoint) const;
  /// Removes the oldest checkpoints of this run beyond `limit`, never those of `keep`. Call after a commit.
  void prune(int64_t limit, const std::vector<std::string>& keep) const;

 private:
  friend class CheckpointWriter;
  void write_run_file(const std::string& from, const std::string& from_run) const;

  std::string path_;
  std::optional<files::FolderLock> lock_;
  std::string run_id_, parent_;
};

/// A checkpoint under construction. Unless commit() is called it vanishes with the object.
class CheckpointWriter {
 public:
  /// @param run  must outlive it.  @throws IoError.
  CheckpointWriter(RunFolder& run, int64_t step);
  ~CheckpointWriter() { discard(); }
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  /// Where to write the files.
  [[nodiscard]] const std::string& folder() const { return temporary_; }
  /// Flushes all files, writes the manifest and renames the folder to checkpoint-<step>; one of that name is exchanged for it in one step.
  /// @returns its path.  @throws IoError.
  std::string commit();
  /// Removes what was written. After commit() it does nothing.
  void discard();

 private:
  RunFolder* run_;
  int64_t step_;
  std::string final_, temporary_;
  bool committed_ = false;
};

/// (step, path) of all checkpoint folders, oldest step first. Ordered by step, never by time stamps.
[[nodiscard]] std::vector<std::pair<int64_t, std::string>> list_checkpoints(const std::string& output_dir);

struct NewestCheckpoint {
  std::optional<std::string> path;   ///< Of the folder's run, and undamaged.
  std::vector<std::string> skipped;  ///< Newer ones, each with the reason: "checkpoint-40 (…)".
};
/// The newest checkpoint of the run that the folder belongs to; without one the checkpoint that this run began from, or an older one of that
/// run. Reads every file of it, and of older ones as long as it finds damage.
[[nodiscard]] NewestCheckpoint newest_checkpoint(const std::string& output_dir);

/// @throws FormatError "[resume] …" naming each file that is missing or was changed, and an older checkpoint that is whole.
void check_checkpoint(const std::string& checkpoint);

}  // namespace qlorapp
