// SPDX-License-Identifier: Apache-2.0
#include "io/background_commit.hpp"

#include <chrono>
#include <exception>
#include <system_error>
#include <utility>

#include "core/check.hpp"
#include "qlorapp/core/log.hpp"

namespace qlorapp {

void BackgroundCommit::start(std::shared_ptr<RunFolder> run, std::shared_ptr<CheckpointWriter> checkpoint,
                             std::optional<int64_t> limit, std::vector<std::string> keep) {
  wait();
  const auto commit = [run = std::move(run), checkpoint = std::move(checkpoint), limit, keep = std::move(keep)] {
    try {
      std::string path = checkpoint->commit();
      if (limit && *limit > 0) {
        std::vector<std::string> kept = keep;
        kept.push_back(path);
        run->prune(*limit, kept);
      }
      return path;
    } catch (...) {
      checkpoint->discard();  // others may hold it
      throw;
    }
  };
  try {
    path_ = std::async(std::launch::async, commit);
  } catch (const std::system_error&) {  // no more threads may be made: then the caller waits
    path_ = std::async(std::launch::deferred, commit);
  }
}

std::optional<std::string> BackgroundCommit::poll() {
  if (!path_.valid() || path_.wait_for(std::chrono::seconds(0)) == std::future_status::timeout) return std::nullopt;
  return path_.get();
}

std::optional<std::string> BackgroundCommit::wait() {
  if (!path_.valid()) return std::nullopt;
  return path_.get();
}

std::optional<std::string> BackgroundCommit::settle() noexcept try { return wait(); } catch (const std::exception& error) {
  log_warning(message("[checkpoint] saving the last checkpoint failed: {}", error.what()));
  return std::nullopt;
}

}  // namespace qlorapp
