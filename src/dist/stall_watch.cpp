// SPDX-License-Identifier: Apache-2.0
#include "dist/stall_watch.hpp"

#include <algorithm>
#include <exception>
#include <utility>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "core/check.hpp"

namespace qlorapp {
namespace {

/// Shorter than torch's watchdog, which ends the process without naming a rank.
std::chrono::milliseconds patience_of(std::chrono::milliseconds timeout) { return timeout * 9 / 10; }

}  // namespace

StallWatch::StallWatch(const MeetingPlace& place, int64_t rank, at::Device device, std::function<void(const std::string& why)> end)
    : store_(place.store()->clone()),
      prefix_(place.prefix()),
      numbers_(place.numbers()),
      rank_(rank),
      device_(device),
      end_(std::move(end)),
      patience_(patience_of(place.timeout())),
      thread_([this] { watch(); }) {}

StallWatch::~StallWatch() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void StallWatch::set_timeout(std::chrono::milliseconds timeout) {
  const std::lock_guard lock(mutex_);
  patience_ = patience_of(timeout);
}

void StallWatch::count() {
  const std::lock_guard lock(mutex_);
  ++count_;
}

void StallWatch::during(const std::function<void()>& call, bool is_on_stream) {
  {
    const std::lock_guard lock(mutex_);
    host_waits_ = true;
    host_since_ = Clock::now();
  }
  struct End {
    StallWatch& watch;
    ~End() {
      const std::lock_guard lock(watch.mutex_);
      watch.host_waits_ = false;
    }
  } const end{*this};
  call();
  if (!is_on_stream) return;
  const int64_t next = turn_++ % std::ssize(marks_);
  Mark& mark = marks_[static_cast<size_t>(next)];
  if (!mark.event) mark.event.emplace(device_.type());
  mark.event->record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));  // may block, and so without the lock
  const std::lock_guard lock(mutex_);
  mark.since = Clock::now();
  marked_ = next;
}

void StallWatch::watch() {
  int64_t seen = 0, posted = -1;
  std::unique_lock lock(mutex_);
  const auto tick = [this] { return std::clamp(patience_ / 20, std::chrono::milliseconds{20}, std::chrono::milliseconds{1000}); };
  while (!changed_.wait_for(lock, tick(), [this] { return ends_; })) {
    const int64_t count = count_, marked = marked_;
    const std::chrono::milliseconds waited = patience_;
    const auto now = Clock::now();
    const Clock::time_point since = marked < 0 ? now : marks_[static_cast<size_t>(marked)].since;
    const bool host_is_stuck = host_waits_ && now - host_since_ >= waited;
    lock.unlock();  // what follows may block
    std::string reason;
    bool is_through = false;
    try {
      is_through = marked >= 0 && marks_[static_cast<size_t>(marked)].event->query();
      const bool is_stuck = host_is_stuck || (marked >= 0 && !is_through && now - since >= waited);
      if (count == seen && posted != count) {
        post(count);
        posted = count;
      }
      if (is_stuck) reason = why(count, waited);
    } catch (const std::exception&) {}  // the store or the device is gone, and the next exchange says so
    if (!reason.empty()) return end_(reason);
    lock.lock();
    if (is_through && marked_ == marked) marked_ = -1;
    seen = count;
  }
}

std::string StallWatch::key(int64_t rank) const { return message("{}begun/{}", prefix_, rank); }

void StallWatch::post(int64_t count) {
  const std::string text = std::to_string(count);
  store_->set(key(rank_), std::vector<uint8_t>(text.begin(), text.end()));
}

std::string StallWatch::why(int64_t count, std::chrono::milliseconds waited) {
  std::vector<int64_t> behind;
  for (int64_t rank = 0; rank < std::ssize(numbers_); ++rank) {
    if (rank == rank_) continue;
    int64_t there = -1;
    if (store_->check({key(rank)})) {
      const std::vector<uint8_t> text = store_->get(key(rank));
      there = std::stoll(std::string(text.begin(), text.end()));
    }
    if (there < count) behind.push_back(numbers_[static_cast<size_t>(rank)]);
  }
  std::string reason = message("[ranks] rank {} waited {} s in an exchange ", numbers_[static_cast<size_t>(rank_)],
                               std::max<int64_t>(1, waited.count() / 1000));
  if (behind.empty()) {
    reason += "that all ranks have begun: a GPU or the network hangs. NCCL_DEBUG=INFO prints what NCCL does.";
  } else {
    reason += message("for {} {}, which did not come to it: look at {} output. Raise ddp_timeout if it is only slow.",
                      behind.size() == 1 ? "rank" : "ranks", joined(behind), behind.size() == 1 ? "its" : "their");
  }
  // The first report wins, so that all ranks raise the same message.
  const std::vector<uint8_t> first =
      store_->compareSet(MeetingPlace::kFailure, std::vector<uint8_t>(), {reason.begin(), reason.end()});
  return {first.begin(), first.end()};
}

}  // namespace qlorapp
