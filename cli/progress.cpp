// SPDX-License-Identifier: Apache-2.0
#include "progress.hpp"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "core/escaped.hpp"

namespace qlorapp::cli {
namespace {

using Clock = std::chrono::steady_clock;

ProgressBar* current_bar = nullptr;

}  // namespace

ProgressBar::ProgressBar(std::string label)
    : label_(std::move(label)), on_terminal_(::isatty(STDERR_FILENO) == 1), begin_(Clock::now()) {
  current_bar = this;
}

ProgressBar::~ProgressBar() {
  clear();
  if (current_bar == this) current_bar = nullptr;
}

void ProgressBar::update(int64_t done, int64_t total, const std::function<std::string()>& note) {
  if (!on_terminal_) return;
  done_ = done;
  total_ = total;
  const auto now = Clock::now();
  if (drawn_ && done < total && now - last_ < std::chrono::milliseconds(200)) return;
  last_ = now;
  if (note) note_ = note();
  draw();
}

void ProgressBar::line(std::string_view text) { print_line(stdout, text); }

void ProgressBar::draw() {
  constexpr int64_t kWidth = 30;
  const int64_t filled = total_ > 0 ? std::clamp<int64_t>(done_ * kWidth / total_, 0, kWidth) : 0;
  const double seconds = std::chrono::duration<double>(Clock::now() - begin_).count();
  const double left = done_ > 0 ? seconds / static_cast<double>(done_) * static_cast<double>(total_ - done_) : 0.0;
  // \033[K: what a longer line has left behind.
  std::fprintf(stderr, "\r%s [%s%s] %lld/%lld%s%s, %.0f s, %.0f s left\033[K", escaped_line(label_).c_str(),
               std::string(static_cast<size_t>(filled), '#').c_str(),
               std::string(static_cast<size_t>(kWidth - filled), '.').c_str(), static_cast<long long>(done_),
               static_cast<long long>(total_), note_.empty() ? "" : ", ", escaped_line(note_).c_str(), seconds, left);
  std::fflush(stderr);
  drawn_ = true;
}

void ProgressBar::clear() {
  if (!drawn_) return;
  std::fprintf(stderr, "\r\033[K");
  std::fflush(stderr);
  drawn_ = false;
}

void print_text(std::FILE* to, std::string_view text) {
  const std::string shown = escaped(text);
  std::fwrite(shown.data(), 1, shown.size(), to);
}

void print_line(std::FILE* to, std::string_view text) {
  ProgressBar* const bar = current_bar;
  const bool was_drawn = bar != nullptr && bar->drawn_;
  if (bar != nullptr) bar->clear();
  print_text(to, text);
  std::fputc('\n', to);
  std::fflush(to);
  if (was_drawn && bar->done_ < bar->total_) bar->draw();
}

}  // namespace qlorapp::cli
