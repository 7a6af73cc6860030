// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/memory/caching_allocator.hpp"

#include <cstddef>

namespace qlorapp {
namespace {

constexpr int64_t kMinBlock = 512;
constexpr int64_t kSmallRequest = int64_t{1} << 20, kSmallSegment = int64_t{2} << 20;
constexpr int64_t kLargeRequest = int64_t{10} << 20, kLargeSegment = int64_t{20} << 20, kLargeStep = int64_t{2} << 20;

constexpr int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

}  // namespace

void CachingAllocator::put(int64_t block) {
  Block& own = blocks_[static_cast<size_t>(block)];
  own.free = true;
  pool(own.small).insert({{own.size, own.address}, block});
}

void CachingAllocator::take(int64_t block) {
  Block& own = blocks_[static_cast<size_t>(block)];
  own.free = false;
  pool(own.small).erase({{own.size, own.address}, block});
}

int64_t CachingAllocator::new_segment(int64_t size, bool small) {
  const int64_t bytes = size <= kSmallRequest ? kSmallSegment : size < kLargeRequest ? kLargeSegment : round_up(size, kLargeStep);
  if (bytes > room_ - reserved_) {
    give_back(small_);
    give_back(large_);
    if (bytes > room_ - reserved_) return -1;
  }
  reserved_ += bytes;
  blocks_.push_back({bytes, next_address_, small, /*free=*/false, -1, -1});
  next_address_ += bytes;
  return static_cast<int64_t>(blocks_.size()) - 1;
}

/// Segments of which no part is in use.
void CachingAllocator::give_back(Pool& cached) {
  std::erase_if(cached, [&](const auto& entry) {
    const Block& block = blocks_[static_cast<size_t>(entry.second)];
    const bool whole = block.before < 0 && block.after < 0;
    if (whole) reserved_ -= block.size;
    return whole;
  });
}

bool CachingAllocator::request(int64_t id, int64_t bytes) {
  if (bytes <= 0) return true;
  const int64_t size = round_up(bytes, kMinBlock);
  const bool small = size <= kSmallRequest;
  int64_t found = -1;
  if (const auto fit = pool(small).lower_bound({{size, -1}, -1}); fit != pool(small).end()) {
    found = fit->second;
    take(found);
  } else {
    found = new_segment(size, small);
    if (found < 0) return false;
  }
  const int64_t rest = blocks_[static_cast<size_t>(found)].size - size;
  if (small ? rest >= kMinBlock : rest > kSmallRequest) {
    const int64_t other = static_cast<int64_t>(blocks_.size());
    Block& own = blocks_[static_cast<size_t>(found)];
    const Block behind{rest, own.address + size, small, false, found, own.after};
    if (own.after >= 0) blocks_[static_cast<size_t>(own.after)].before = other;
    own.size = size;
    own.after = other;
    blocks_.push_back(behind);
    put(other);
  }
  allocated_ += blocks_[static_cast<size_t>(found)].size;
  owned_[id] = found;
  return true;
}

/// `with`, which follows or precedes, becomes part of `block`, if it is free.
void CachingAllocator::join(int64_t block, int64_t with) {
  if (with < 0 || !blocks_[static_cast<size_t>(with)].free) return;
  take(with);
  Block &own = blocks_[static_cast<size_t>(block)], &other = blocks_[static_cast<size_t>(with)];
  own.size += other.size;
  if (own.before == with) {
    own.address = other.address;
    own.before = other.before;
    if (own.before >= 0) blocks_[static_cast<size_t>(own.before)].after = block;
  } else {
    own.after = other.after;
    if (own.after >= 0) blocks_[static_cast<size_t>(own.after)].before = block;
  }
}

void CachingAllocator::release(int64_t id) {
  const auto found = owned_.find(id);
  if (found == owned_.end()) return;
  const int64_t block = found->second;
  owned_.erase(found);
  allocated_ -= blocks_[static_cast<size_t>(block)].size;
  join(block, blocks_[static_cast<size_t>(block)].before);
  join(block, blocks_[static_cast<size_t>(block)].after);
  put(block);
}

}  // namespace qlorapp
