// SPDX-License-Identifier: Apache-2.0
/// Names the rank that hangs while the others wait for it. Uses a thread of its own, because the computing thread may be blocked.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/util/intrusive_ptr.h>

#include "dist/store_communicator.hpp"

namespace qlorapp {

/// Each rank counts the exchanges that it has begun, and stores the count when it stops changing. A rank that waits too long compares the
/// counts. A rank with a lower count has not reached the exchange.
class StallWatch {
 public:
  /// @param end  called once, from the watch's thread, with a message that names the ranks; the failure has been reported to the others.
  StallWatch(const MeetingPlace& place, int64_t rank, at::Device device, std::function<void(const std::string& why)> end);
  ~StallWatch();
  StallWatch(const StallWatch&) = delete;
  StallWatch& operator=(const StallWatch&) = delete;

  void set_timeout(std::chrono::milliseconds timeout);
  /// An exchange is about to begin.
  void count();
  /// This thread may wait for others inside `call`. @param is_on_stream  from then on the current stream waits: an event says when it is
  /// through.
  void during(const std::function<void()>& call, bool is_on_stream);

 private:
  using Clock = std::chrono::steady_clock;

  void watch();
  void post(int64_t count);
  [[nodiscard]] std::string why(int64_t count, std::chrono::milliseconds waited);
  [[nodiscard]] std::string key(int64_t rank) const;

  c10::intrusive_ptr<c10d::Store> store_;  ///< A connection of its own: another thread's waits hold up a shared one.
  std::string prefix_;
  std::vector<int64_t> numbers_;
  int64_t rank_;
  at::Device device_;
  std::function<void(const std::string&)> end_;

  std::mutex mutex_;
  std::chrono::milliseconds patience_;
  std::condition_variable changed_;
  bool ends_ = false;
  int64_t count_ = 0;
  /// An event behind an exchange on a stream. A Work would keep the tensors alive.
  struct Mark {
    std::optional<c10::Event> event;
    Clock::time_point since;
  };
  bool host_waits_ = false;
  Clock::time_point host_since_;
  int64_t turn_ = 0;           ///< Of the thread that computes.
  std::array<Mark, 4> marks_;  ///< In turn: the watch reads one while this rank's thread records the next.
  int64_t marked_ = -1;        ///< The latest; -1: none, or it is through.
  std::thread thread_;
};

}  // namespace qlorapp
