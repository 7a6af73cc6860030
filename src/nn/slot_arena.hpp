// SPDX-License-Identifier: Apache-2.0
/// Which slots of a cache are free. Torch-free.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <memory>

namespace qlorapp {

class SlotArena;

/// Slots that are taken, until this is destroyed.
class SlotRange {
 public:
  SlotRange(SlotArena& arena, int64_t first, int64_t count) : first_(first), count_(count), arena_(arena) {}
  SlotRange(const SlotRange&) = delete;
  SlotRange& operator=(const SlotRange&) = delete;
  inline ~SlotRange();

  [[nodiscard]] int64_t first() const { return first_; }
  [[nodiscard]] int64_t count() const { return count_; }
  /// The first `count` of them become a range of their own.
  [[nodiscard]] std::shared_ptr<SlotRange> cut(int64_t count) {
    auto front = std::make_shared<SlotRange>(arena_, first_, count);
    first_ += count, count_ -= count;
    return front;
  }
  /// The first `count` of the range behind this one become its last.
  void grow(SlotRange& behind, int64_t count) {
    count_ += count;
    behind.first_ += count, behind.count_ -= count;
  }

 private:
  int64_t first_, count_;
  SlotArena& arena_;
};

/// Ranges of slots, handed out first fit. Neighbors that are free become one range again. Outlives what it hands out.
class SlotArena {
 public:
  explicit SlotArena(int64_t slots) { give_back(0, slots); }
  SlotArena(const SlotArena&) = delete;
  SlotArena& operator=(const SlotArena&) = delete;

  /// @returns `count` slots; null if no free range is that long.
  [[nodiscard]] std::shared_ptr<SlotRange> take(int64_t count) {
    for (auto range = free_.begin(); range != free_.end(); ++range) {
      if (range->second < count) continue;
      const auto [start, size] = *range;
      free_.erase(range);
      if (size > count) free_[start + count] = size - count;
      return std::make_shared<SlotRange>(*this, start, count);
    }
    return nullptr;
  }

 private:
  friend class SlotRange;

  void give_back(int64_t start, int64_t count) {
    if (count == 0) return;
    auto next = free_.lower_bound(start);
    if (next != free_.end() && start + count == next->first) {
      count += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin()) {
      const auto before = std::prev(next);
      if (before->first + before->second == start) {
        before->second += count;
        return;
      }
    }
    free_[start] = count;
  }

  std::map<int64_t, int64_t> free_;  ///< Size by first slot.
};

inline SlotRange::~SlotRange() { arena_.give_back(first_, count_); }

}  // namespace qlorapp
