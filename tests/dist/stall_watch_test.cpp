// SPDX-License-Identifier: Apache-2.0
// A rank that does not come to an exchange is named by those that wait in it.
#include "dist/stall_watch.hpp"

#include <chrono>
#include <future>
#include <string>
#include <thread>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "catch.hpp"
#include "format/expect_error.hpp"

using namespace qlorapp;

namespace {

constexpr std::chrono::milliseconds kTimeout{600};

/// One of three ranks, which counts exchanges and waits.
struct Watched {
  Watched(const c10::intrusive_ptr<c10d::Store>& store, int64_t rank)
      : place(store, rank, 3, kTimeout), watch(place, rank, at::kCPU, [this](const std::string& why) { ended.set_value(why); }) {}

  void begin(int exchanges) {
    for (int i = 0; i < exchanges; ++i) watch.count();
  }
  /// Returns the watch's message to a rank that waits, or "" after twice the timeout.
  std::string waits() {
    auto found = ended.get_future();
    std::string why;
    watch.during([&] { why = found.wait_for(2 * kTimeout) == std::future_status::ready ? found.get() : std::string(); }, false);
    return why;
  }

  MeetingPlace place;
  std::promise<std::string> ended;
  StallWatch watch;
};

}  // namespace

TEST_CASE("who has begun fewer exchanges is named", "[dist][cpu]") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  Watched first(store, 0), second(store, 1), third(store, 2);
  first.begin(5);
  second.begin(4);  // and computes for long, or hangs
  third.begin(5);
  auto other = std::async(std::launch::async, [&] { return third.waits(); });
  const std::string why = first.waits();
  REQUIRE(has(why, "in an exchange for rank [1], which did not come to it"));
  REQUIRE(other.get() == why);                     // one message on all
  REQUIRE(second.place.failure(kTimeout) == why);  // which a rank that comes late gets, too
  REQUIRE(has(thrown<IoError>([&] { (void)second.place.exchange({}); }), why));
  REQUIRE(has(thrown<IoError>([&] { (void)second.place.exchange({}); }), "Start the processes again"));
}

TEST_CASE("where all have come, a device or the network hangs", "[dist][cpu]") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  Watched first(store, 0), second(store, 1), third(store, 2);
  for (Watched* each : {&first, &second, &third}) each->begin(2);
  REQUIRE(has(first.waits(), "that all ranks have begun: a GPU or the network hangs"));
}

TEST_CASE("a rank that waits for none is not ended, however long it takes", "[dist][cpu]") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  Watched first(store, 0), second(store, 1), third(store, 2);
  first.begin(1);
  first.watch.during([] {}, false);
  REQUIRE(first.ended.get_future().wait_for(2 * kTimeout) == std::future_status::timeout);
  REQUIRE(first.place.failure(std::chrono::milliseconds{1}).empty());
}
