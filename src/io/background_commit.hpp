// SPDX-License-Identifier: Apache-2.0
/// Commits checkpoints while training goes on: what the disk and the checksums take is not waited for by the GPU.
///
/// The files of a checkpoint are written before, so nothing of the model is read here, and its folder gets its name when all of it is on the
/// disk. A program that is killed meanwhile has the checkpoint before it, as if it had been killed during a save.
#pragma once

#include <cstdint>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io/checkpoint_folder.hpp"

namespace qlorapp {

/// One at a time. For one thread, which starts and asks.
class BackgroundCommit {
 public:
  BackgroundCommit() = default;
  ~BackgroundCommit() { settle(); }
  BackgroundCommit(const BackgroundCommit&) = delete;
  BackgroundCommit& operator=(const BackgroundCommit&) = delete;

  /// Commits `checkpoint` and then prunes `run`, on a thread. Waits for the one before.
  /// @param checkpoint  of `run`; not to be touched any more.
  /// @param limit       as RunFolder::prune(); none: nothing is removed.
  /// @param keep        beside the checkpoint itself.
  /// @throws what the one before failed of.
  void start(std::shared_ptr<RunFolder> run, std::shared_ptr<CheckpointWriter> checkpoint, std::optional<int64_t> limit,
             std::vector<std::string> keep);
  /// Path of the checkpoint if it has become whole since the last call of this or of wait(). @throws what it failed of.
  std::optional<std::string> poll();
  /// The same, when it has.
  std::optional<std::string> wait();
  /// Waits; what it failed of is logged. @returns as wait(), and nothing if it failed.
  std::optional<std::string> settle() noexcept;

 private:
  std::future<std::string> path_;
};

}  // namespace qlorapp
