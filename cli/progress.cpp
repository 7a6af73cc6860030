// SPDX-License-Identifier: Apache-2.0
#include "progress.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

namespace qlorapp::cli {

using Clock = std::chrono::steady_clock;

ProgressBar::ProgressBar(std::string label)
    : label_(std::move(label)), on_terminal_(::isatty(STDERR_FILENO) == 1), begin_(Clock::now()) {}

ProgressBar::~ProgressBar() { clear(); }

void ProgressBar::update(int64_t done, int64_t total) {
  if (!on_terminal_) return;
  done_ = done;
  total_ = total;
  const auto now = Clock::now();
  if (drawn_ && done < total && now - last_ < std::chrono::milliseconds(200)) return;
  last_ = now;
  draw(done, total);
}

void ProgressBar::line(std::string_view text) {
  clear();
  std::printf("%.*s\n", static_cast<int>(text.size()), text.data());
  std::fflush(stdout);
  if (on_terminal_ && total_ > 0) draw(done_, total_);
}

void ProgressBar::draw(int64_t done, int64_t total) {
  constexpr int64_t kWidth = 30;
  const int64_t filled = total > 0 ? std::clamp<int64_t>(done * kWidth / total, 0, kWidth) : 0;
  const double seconds = std::chrono::duration<double>(Clock::now() - begin_).count();
  const double left = done > 0 ? seconds / static_cast<double>(done) * static_cast<double>(total - done) : 0.0;
  std::fprintf(stderr, "\r%s [%s%s] %lld/%lld, %.0f s, %.0f s left ", label_.c_str(),
               std::string(static_cast<size_t>(filled), '#').c_str(),
               std::string(static_cast<size_t>(kWidth - filled), '.').c_str(), static_cast<long long>(done),
               static_cast<long long>(total), seconds, left);
  std::fflush(stderr);
  drawn_ = true;
}

void ProgressBar::clear() {
  if (!drawn_) return;
  std::fprintf(stderr, "\r\033[K");
  std::fflush(stderr);
  drawn_ = false;
}

}  // namespace qlorapp::cli
