// SPDX-License-Identifier: Apache-2.0
/// What torch's CUDA caching allocator makes of a sequence of requests: bytes handed out and bytes taken from the driver.
///
///     handed out   a request is rounded up to 512 bytes; a cached block that is not more than 1 MiB too large is handed out
///     whole reserved     requests up to 1 MiB come out of segments of 2 MiB, below 10 MiB of 20 MiB, larger ones of their own
///     size
///                  rounded up to 2 MiB; a freed block joins its free neighbors and stays reserved
///
/// The first is torch.cuda.memory_allocated, the second memory_reserved; what lies between is cache and fragmentation. Where the
/// device has no room for another segment, all segments that are wholly free are given back to it, and it is asked once more.
/// The rules are those of c10/cuda/CUDACachingAllocator.cpp in torch 2.11 with default settings and one stream. Knows no GPU, and
/// no torch.
#pragma once

#include <cstdint>
#include <limits>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace qlorapp {

class CachingAllocator {
 public:
  /// @param room  bytes that may be reserved.
  explicit CachingAllocator(int64_t room = std::numeric_limits<int64_t>::max()) : room_(room) {}

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
    int64_t before = -1, after = -1;  ///< Neighbors in the segment.
  };
  using Pool = std::set<std::pair<std::pair<int64_t, int64_t>, int64_t>>;  ///< ((size, address), block)

  /// @returns the block, or -1.
  int64_t new_segment(int64_t size, bool small);
  void give_back(Pool& cached);
  [[nodiscard]] Pool& pool(bool small) { return small ? small_ : large_; }
  void put(int64_t block);
  void take(int64_t block);
  void join(int64_t block, int64_t with);

  std::vector<Block> blocks_;
  Pool small_, large_;
  std::unordered_map<int64_t, int64_t> owned_;
  int64_t room_, allocated_ = 0, reserved_ = 0, next_address_ = 0;
};

}  // namespace qlorapp
