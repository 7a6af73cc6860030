// SPDX-License-Identifier: Apache-2.0
// The rules of torch's CUDA caching allocator, each by hand from its description.
#include "memory/caching_allocator.hpp"
#include "catch.hpp"

using qlorapp::CachingAllocator;

namespace {
constexpr int64_t kMiB = int64_t{1} << 20;
}

TEST_CASE("requests are rounded to 512 bytes and small ones share segments of 2 MiB") {
  CachingAllocator allocator;
  allocator.request(1, 1);
  CHECK(allocator.allocated() == 512);
  CHECK(allocator.reserved() == 2 * kMiB);
  allocator.request(2, 513);
  CHECK(allocator.allocated() == 512 + 1024);
  CHECK(allocator.reserved() == 2 * kMiB);
  allocator.request(3, 0);
  CHECK(allocator.allocated() == 512 + 1024);
}

TEST_CASE("requests below 10 MiB come out of segments of 20 MiB, larger ones out of their own") {
  CachingAllocator allocator;
  allocator.request(1, 3 * kMiB);
  CHECK(allocator.allocated() == 3 * kMiB);
  CHECK(allocator.reserved() == 20 * kMiB);
  allocator.request(2, 11 * kMiB + 1);
  CHECK(allocator.reserved() == 20 * kMiB);  // 17 MiB were left
  CHECK(allocator.allocated() == 14 * kMiB + 512);
  allocator.request(3, 11 * kMiB + 1);
  CHECK(allocator.reserved() == 32 * kMiB);  // 12 more
}

TEST_CASE("a large block that leaves 1 MiB or less is handed out whole, and counts so") {
  CachingAllocator allocator;
  allocator.request(1, 12 * kMiB);
  allocator.release(1);
  allocator.request(2, 11 * kMiB);
  CHECK(allocator.allocated() == 12 * kMiB);
  CHECK(allocator.reserved() == 12 * kMiB);
}

TEST_CASE("freed neighbors join, and the smallest block that fits is taken") {
  CachingAllocator allocator;
  for (int64_t id = 0; id < 4; ++id) allocator.request(id, 5 * kMiB);
  CHECK(allocator.reserved() == 20 * kMiB);
  allocator.release(1);
  allocator.release(2);
  CHECK(allocator.allocated() == 10 * kMiB);
  allocator.request(5, 10 * kMiB);
  CHECK(allocator.reserved() == 20 * kMiB);
  allocator.release(0);
  allocator.release(3);
  allocator.request(6, 6 * kMiB);  // two holes of 5 do not make one of 6
  CHECK(allocator.reserved() == 40 * kMiB);
  allocator.request(7, 4 * kMiB);
  CHECK(allocator.reserved() == 40 * kMiB);
  for (const int64_t id : {5, 6, 7}) allocator.release(id);
  CHECK(allocator.allocated() == 0);
}

TEST_CASE("a full device gets back what is wholly free, and only then is out of memory") {
  constexpr int64_t kMiB = 1 << 20;
  CachingAllocator allocator(64 * kMiB);
  CHECK(allocator.request(0, 30 * kMiB));
  CHECK(allocator.request(1, 30 * kMiB));
  allocator.release(0);
  CHECK(allocator.reserved() == 60 * kMiB);
  CHECK(allocator.request(2, 32 * kMiB));  // in the place of the first
  CHECK(allocator.reserved() == 62 * kMiB);
  CHECK_FALSE(allocator.request(3, 12 * kMiB));
  CHECK(allocator.allocated() == 62 * kMiB);
  allocator.release(3);  // was never handed out
  allocator.release(1);
  CHECK(allocator.request(4, 16 * kMiB));  // half of a segment, which then is not free any more
  CHECK_FALSE(allocator.request(5, 30 * kMiB));
  CHECK(allocator.reserved() == 62 * kMiB);
}

TEST_CASE("expandable segments take pages of 20 MiB, and of 2 MiB for requests up to 1 MiB, and split every block") {
  CachingAllocator allocator(CachingAllocator::kNoLimit, CachingAllocator::Segments::kExpandable);
  allocator.request(1, 3 * kMiB);
  CHECK(allocator.reserved() == 20 * kMiB);
  allocator.request(2, 30 * kMiB);  // 17 are there, 13 are on the next page
  CHECK(allocator.reserved() == 40 * kMiB);
  allocator.request(3, 7 * kMiB - 512);  // fills the second page to its last block, which is handed out alone
  CHECK(allocator.allocated() == 40 * kMiB - 512);
  CHECK(allocator.reserved() == 40 * kMiB);
  allocator.request(4, kMiB);
  CHECK(allocator.reserved() == 42 * kMiB);
  allocator.release(2);
  allocator.request(5, 30 * kMiB - 1024);
  CHECK(allocator.allocated() == 41 * kMiB - 512 - 1024);
  CHECK(allocator.reserved() == 42 * kMiB);
}

TEST_CASE("a hole of an expandable segment gives its pages back, and they serve where more is needed") {
  CachingAllocator fixed(200 * kMiB), expandable(200 * kMiB, CachingAllocator::Segments::kExpandable);
  for (CachingAllocator* const allocator : {&fixed, &expandable}) {
    for (int64_t id = 0; id < 4; ++id) CHECK(allocator->request(id, 40 * kMiB));
    allocator->release(0);
    allocator->release(2);
    CHECK(allocator->request(4, 10 * kMiB));  // in one hole, which as a segment of its own is now neither free nor of use
    CHECK(allocator->allocated() == 90 * kMiB);
  }
  CHECK_FALSE(fixed.request(5, 100 * kMiB));
  CHECK(expandable.request(5, 100 * kMiB));
  CHECK(expandable.allocated() == 190 * kMiB);
  CHECK(expandable.reserved() == 200 * kMiB);
  CHECK_FALSE(expandable.request(6, 11 * kMiB));
  expandable.release(5);
  CHECK(expandable.request(6, 11 * kMiB));
}

TEST_CASE("the block that cannot grow is taken before one at the end of an expandable segment") {
  CachingAllocator allocator(CachingAllocator::kNoLimit, CachingAllocator::Segments::kExpandable);
  allocator.request(1, 30 * kMiB);
  allocator.request(2, 10 * kMiB);
  allocator.request(3, 40 * kMiB);
  allocator.release(1);  // a hole of 30
  allocator.release(3);  // the end, of 40, which fits 25 worse; and 5 at the end of it would fit better
  allocator.request(4, 35 * kMiB);
  CHECK(allocator.reserved() == 80 * kMiB);
  allocator.request(5, 5 * kMiB);  // the smallest that fits is the end's 5, but that one could grow
  allocator.request(6, 45 * kMiB);
  CHECK(allocator.reserved() == 120 * kMiB);  // the end's 5 and 40 more
}
