// SPDX-License-Identifier: Apache-2.0
#include "io/background_commit.hpp"

#include <chrono>
#include <exception>
#include <utility>

#include "core/check.hpp"
#include "qlorapp/core/log.hpp"

namespace qlorapp {

void BackgroundCommit::start(std::shared_ptr<RunFolder> run, std::shared_ptr<CheckpointWriter> checkpoint,
                             std::optional<int64_t> limit, std::vector<std::string> keep) {
  wait();
  path_ = std::async(std::launch::async, [run = std::move(run), checkpoint = std::move(checkpoint), limit, keep = std::move(keep)] {
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
  });
}

std::optional<std::string> BackgroundCommit::poll() {
  if (!path_.valid() || path_.wait_for(std::chrono::seconds(0)) != std::future_status::ready) return std::nullopt;
  return path_.get();
}

std::optional<std::string> BackgroundCommit::wait() {
  if (!path_.valid()) return std::nullopt;
  return path_.get();
}

void BackgroundCommit::settle() noexcept try { wait(); } catch (const std::exception& error) {
  log_warning(message("[checkpoint] the last checkpoint was not saved: {}", error.what()));
}

}  // namespace qlorapp
