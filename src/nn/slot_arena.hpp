// SPDX-License-Identifier: Apache-2.0
/// Which slots of a cache are free. Torch-free.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <optional>

namespace qlorapp {

/// Ranges of slots, handed out first fit. Neighbors that are free become one range again.
class SlotArena {
 public:
  explicit SlotArena(int64_t slots) {
    if (slots > 0) free_[0] = slots;
  }

  /// @returns the first of `count` slots; nothing if no range is that long.
  [[nodiscard]] std::optional<int64_t> take(int64_t count) {
    for (auto range = free_.begin(); range != free_.end(); ++range) {
      if (range->second < count) continue;
      const auto [start, size] = *range;
      free_.erase(range);
      if (size > count) free_[start + count] = size - count;
      return start;
    }
    return std::nullopt;
  }

  /// Gives back what take() returned, with its count.
  void give_back(int64_t start, int64_t count) {
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

 private:
  std::map<int64_t, int64_t> free_;  ///< Size by first slot.
};

}  // namespace qlorapp
