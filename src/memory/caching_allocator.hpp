// SPDX-License-Identifier: Apache-2.0
/// What torch's CUDA caching allocator makes of a sequence of requests: bytes handed out and bytes taken from the driver.
///
///     handed out   a request is rounded up to 512 bytes and comes out of the smallest cached block that holds it; with fixed
///                  segments a block that is not more than 1 MiB too large is handed out whole
///     reserved     fixed segments: requests up to 1 MiB come out of segments of 2 MiB, below 10 MiB of 20 MiB, larger ones of their
///                  own size rounded up to 2 MiB; a freed block joins its free neighbors and stays reserved
///                  expandable segments: two address ranges without end, one for requests up to 1 MiB and one for larger ones, of
///                  which pages of 2 MiB and 20 MiB are mapped at the lowest address where the request fits, beside what is free there
///
/// The first is torch.cuda.memory_allocated, the second memory_reserved; the difference is cache and fragmentation. Where the
/// device has no room for another segment or page, all segments that are wholly free, or all pages, are given back to it, and it is
/// asked once more. The rules are those of c10/cuda/CUDACachingAllocator.cpp in torch 2.11 with default settings and one stream.
/// Knows no GPU, and no torch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace qlorapp {

class CachingAllocator {
 public:
  enum class Segments : uint8_t { kFixed, kExpandable };
  static constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

  /// @param room  bytes that may be reserved.
  explicit CachingAllocator(int64_t room = kNoLimit, Segments segments = Segments::kFixed)
      : expandable_(segments == Segments::kExpandable), room_(room) {}

  /// @param id  names the block until release(id).  @param bytes  >= 0; nothing happens for 0.
  /// @returns false if there is no room: out of memory. Nothing is handed out then.
  bool request(int64_t id, int64_t bytes);
  void release(int64_t id);

  [[nodiscard]] int64_t allocated() const { return allocated_; }
  [[nodiscard]] int64_t reserved() const { return reserved_; }

 private:
  struct Block {
    int64_t size = 0;
    int64_t address = 0;
    bool small = false, free = false;
    bool mapped = true;               ///< false: addresses of an expandable segment without memory; free, too.
    int64_t before = -1, after = -1;  ///< Neighbors in the segment.
  };
  struct Pool {
    std::set<std::pair<std::pair<int64_t, int64_t>, int64_t>>
        cached;                                      ///< ((size, address), block), of those that are free and mapped.
    std::set<std::pair<int64_t, int64_t>> unmapped;  ///< (address, block)
  };

  [[nodiscard]] Block& at(int64_t block) { return blocks_[static_cast<size_t>(block)]; }
  [[nodiscard]] Pool& pool(bool small) { return small ? small_ : large_; }
  void put(int64_t block);
  void take(int64_t block);
  void join(int64_t block, int64_t with);
  /// Splits a block that is in no pool after `size` bytes. @returns the second part, in no pool either.
  int64_t split(int64_t block, int64_t size);

  /// These return a block that is in no pool, or -1.
  int64_t cached(int64_t size, bool small);
  int64_t new_segment(int64_t size, bool small);
  int64_t expand(int64_t size, bool small);

  [[nodiscard]] int64_t lowest_space(int64_t size, bool small);
  [[nodiscard]] int64_t pages_for(int64_t first, int64_t size, bool small);
  int64_t map(int64_t block, int64_t bytes);
  void unmap(int64_t block);
  void give_back();

  std::vector<Block> blocks_;
  Pool small_, large_;
  std::unordered_map<int64_t, int64_t> owned_;
  bool expandable_;
  int64_t room_, allocated_ = 0, reserved_ = 0, next_address_ = 0;
};

}  // namespace qlorapp
