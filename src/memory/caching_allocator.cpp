// SPDX-License-Identifier: Apache-2.0
#include "memory/caching_allocator.hpp"

#include <algorithm>
#include <cstddef>
#include <iterator>

namespace qlorapp {
namespace {

constexpr int64_t kMinBlock = 512;
constexpr int64_t kSmallRequest = int64_t{1} << 20, kSmallSegment = int64_t{2} << 20;
constexpr int64_t kLargeRequest = int64_t{10} << 20, kLargeSegment = int64_t{20} << 20, kLargeStep = int64_t{2} << 20;

/// Addresses of an expandable segment: torch takes 9/8 of the card's memory and begins another where they do not suffice.
constexpr int64_t kAddresses = (int64_t{1} << 50) / kLargeSegment * kLargeSegment;

constexpr int64_t round_down(int64_t n, int64_t step) { return n / step * step; }
constexpr int64_t round_up(int64_t n, int64_t step) { return round_down(n + step - 1, step); }
constexpr int64_t page(bool small) { return small ? kSmallSegment : kLargeSegment; }

/// What the allocator asks the driver for, and compares with the cap of the process.
constexpr int64_t segment_size(int64_t size) {
  return size <= kSmallRequest ? kSmallSegment : size < kLargeRequest ? kLargeSegment : round_up(size, kLargeStep);
}

}  // namespace

void CachingAllocator::put(int64_t block) {
  Block& own = at(block);
  own.free = true;
  if (own.mapped) pool(own.small).cached.insert({{own.size, own.address}, block});
  else pool(own.small).unmapped.insert({own.address, block});
}

void CachingAllocator::take(int64_t block) {
  Block& own = at(block);
  own.free = false;
  if (own.mapped) pool(own.small).cached.erase({{own.size, own.address}, block});
  else pool(own.small).unmapped.erase({own.address, block});
}

int64_t CachingAllocator::split(int64_t block, int64_t size) {
  const auto other = static_cast<int64_t>(blocks_.size());
  Block& own = at(block);
  Block behind = own;
  behind.size -= size;
  behind.address += size;
  behind.before = block;
  if (own.after >= 0) at(own.after).before = other;
  own.size = size;
  own.after = other;
  blocks_.push_back(behind);
  return other;
}

/// `with`, which follows or precedes, becomes part of `block`, if it is free and as much mapped.
void CachingAllocator::join(int64_t block, int64_t with) {
  if (with < 0 || !at(with).free || at(with).mapped != at(block).mapped) return;
  take(with);
  Block &own = at(block), &other = at(with);
  own.size += other.size;
  if (own.before == with) {
    own.address = other.address;
    own.before = other.before;
    if (own.before >= 0) at(own.before).after = block;
  } else {
    own.after = other.after;
    if (own.after >= 0) at(own.after).before = block;
  }
}

int64_t CachingAllocator::cached(int64_t size, bool small) {
  const auto& blocks = pool(small).cached;
  auto fit = blocks.lower_bound({{size, -1}, -1});
  if (fit == blocks.end()) return -1;
  if (expandable_) {
    // A block that could grow counts with what it could grow to.
    const auto could_be = [&](const auto& entry) {
      const Block& block = at(entry.second);
      return block.size + (block.after >= 0 && !at(block.after).mapped ? at(block.after).size : 0);
    };
    for (auto next = std::next(fit); next != blocks.end() && could_be(*next) < could_be(*fit); ++next) fit = next;
  }
  const int64_t found = fit->second;
  take(found);
  return found;
}

int64_t CachingAllocator::new_segment(int64_t size, bool small) {
  const int64_t bytes = segment_size(size);
  if (bytes > room_ - reserved_) give_back();
  if (bytes > room_ - reserved_) return -1;
  reserved_ += bytes;
  blocks_.push_back({bytes, next_address_, small, /*free=*/false, /*mapped=*/true, -1, -1});
  next_address_ += bytes;
  return static_cast<int64_t>(blocks_.size()) - 1;
}

/// The first block of the lowest stretch of addresses that is free and long enough, mapped or not.
int64_t CachingAllocator::lowest_space(int64_t size, bool small) {
  for (const auto& [address, block] : pool(small).unmapped) {
    const int64_t before = at(block).before;
    const int64_t first = before >= 0 && at(before).free ? before : block;
    int64_t bytes = 0;
    for (int64_t next = first; bytes < size && next >= 0 && at(next).free; next = at(next).after) bytes += at(next).size;
    if (bytes >= size) return first;
  }
  const auto segment = static_cast<int64_t>(blocks_.size());
  blocks_.push_back({kAddresses, next_address_, small, /*free=*/true, /*mapped=*/false, -1, -1});
  next_address_ += kAddresses;
  put(segment);
  return segment;
}

/// Bytes to map before the stretch that begins with `first` has `size` bytes.
int64_t CachingAllocator::pages_for(int64_t first, int64_t size, bool small) {
  int64_t pages = 0;
  for (int64_t block = first; size > 0; block = at(block).after) {
    const int64_t part = std::min(size, at(block).size);
    if (!at(block).mapped) pages += round_up(part, page(small));
    size -= part;
  }
  return pages;
}

/// Memory for the first `bytes` of a block without any. @returns the block that they are in, with its free neighbors.
int64_t CachingAllocator::map(int64_t block, int64_t bytes) {
  take(block);
  const int64_t mapped = round_up(bytes, page(at(block).small));
  if (mapped < at(block).size) put(split(block, mapped));
  at(block).mapped = true;
  reserved_ += mapped;
  join(block, at(block).before);
  join(block, at(block).after);
  put(block);
  return block;
}

int64_t CachingAllocator::expand(int64_t size, bool small) {
  int64_t found = lowest_space(size, small);
  const auto is_full = [&] { return std::max(segment_size(size), pages_for(found, size, small)) > room_ - reserved_; };
  if (is_full()) {
    give_back();
    found = lowest_space(size, small);
    if (is_full()) return -1;
  }
  if (!at(found).mapped) found = map(found, std::min(size, at(found).size));
  while (at(found).size < size) {
    const int64_t next = at(found).after;
    found = map(next, std::min(size - at(found).size, at(next).size));
  }
  take(found);
  return found;
}

/// The whole pages of a free block lose their memory.
void CachingAllocator::unmap(int64_t block) {
  const int64_t step = page(at(block).small), begin = round_up(at(block).address, step),
                end = round_down(at(block).address + at(block).size, step);
  if (begin >= end) return;
  take(block);
  int64_t middle = block;
  if (begin > at(block).address) {
    middle = split(block, begin - at(block).address);
    put(block);
  }
  if (end < at(middle).address + at(middle).size) put(split(middle, end - at(middle).address));
  at(middle).mapped = false;
  reserved_ -= end - begin;
  join(middle, at(middle).before);
  join(middle, at(middle).after);
  put(middle);
}

/// Segments of which no part is in use, or whole pages.
void CachingAllocator::give_back() {
  for (Pool* const pool : {&small_, &large_}) {
    if (expandable_) {
      std::vector<int64_t> blocks;
      for (const auto& entry : pool->cached) blocks.push_back(entry.second);
      for (const int64_t block : blocks) unmap(block);
      continue;
    }
    std::erase_if(pool->cached, [&](const auto& entry) {
      const Block& block = at(entry.second);
      const bool whole = block.before < 0 && block.after < 0;
      if (whole) reserved_ -= block.size;
      return whole;
    });
  }
}

bool CachingAllocator::request(int64_t id, int64_t bytes) {
  if (bytes <= 0) return true;
  const int64_t size = round_up(bytes, kMinBlock);
  const bool small = size <= kSmallRequest;
  int64_t found = cached(size, small);
  if (found < 0) found = expandable_ ? expand(size, small) : new_segment(size, small);
  if (found < 0) return false;
  const int64_t rest = at(found).size - size;
  if (small || expandable_ ? rest >= kMinBlock : rest > kSmallRequest) put(split(found, size));
  allocated_ += at(found).size;
  owned_[id] = found;
  return true;
}

void CachingAllocator::release(int64_t id) {
  const auto found = owned_.find(id);
  if (found == owned_.end()) return;
  const int64_t block = found->second;
  owned_.erase(found);
  allocated_ -= at(block).size;
  join(block, at(block).before);
  join(block, at(block).after);
  put(block);
}

}  // namespace qlorapp
