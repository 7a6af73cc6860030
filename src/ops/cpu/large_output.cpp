// SPDX-License-Identifier: Apache-2.0
#include "large_output.hpp"

#include <cstdint>
#include <mutex>
#include <utility>

#include <ATen/ATen.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace qlorapp::ops {

#if defined(__linux__) && defined(MADV_HUGEPAGE) && defined(MADV_FREE)

namespace {

constexpr size_t kLarge = size_t{4} << 20;
constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kMostKept = size_t{256} << 20;

struct Block {
  void* memory = nullptr;
  size_t bytes = 0;
};

void release(Block block) {
  if (block.memory != nullptr) ::munmap(block.memory, block.bytes);
}

/// The last block that was given back. Its pages are the system's to take whenever it is short of memory (MADV_FREE); what it has
/// not taken until then is used again without a fault.
class SpareBlock {
 public:
  Block take(size_t bytes) {
    const std::lock_guard lock(mutex_);
    return spare_.bytes == bytes ? std::exchange(spare_, {}) : Block{};
  }
  void put(Block block) {
    if (block.bytes > kMostKept) return release(block);
    ::madvise(block.memory, block.bytes, MADV_FREE);
    const std::lock_guard lock(mutex_);
    release(std::exchange(spare_, block));
  }

 private:
  std::mutex mutex_;
  Block spare_;
};

SpareBlock& spare_block() {
  static auto* const block = new SpareBlock;  // tensors may be freed after static destructors have run
  return *block;
}

Block map_huge(size_t bytes) {
  void* const memory = ::mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return {};
  // From a huge page's boundary on: the parts before and after go back.
  const auto begin = reinterpret_cast<uintptr_t>(memory), aligned = (begin + kHugePage - 1) / kHugePage * kHugePage;
  if (aligned > begin) ::munmap(memory, aligned - begin);
  if (const size_t after = begin + kHugePage - aligned; after > 0) ::munmap(reinterpret_cast<void*>(aligned + bytes), after);
  ::madvise(reinterpret_cast<void*>(aligned), bytes, MADV_HUGEPAGE);  // a wish: nothing depends on its result
  return {reinterpret_cast<void*>(aligned), bytes};
}

}  // namespace

at::Tensor empty_large(at::IntArrayRef shape, const at::TensorOptions& options) {
  size_t bytes = options.dtype().itemsize();
  for (const int64_t extent : shape) bytes *= static_cast<size_t>(extent);
  if (bytes < kLarge) return at::empty(shape, options);
  const size_t mapped = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  Block block = spare_block().take(mapped);
  if (block.memory == nullptr) block = map_huge(mapped);
  if (block.memory == nullptr) return at::empty(shape, options);  // which says how much memory there was not
  return at::from_blob(
      block.memory, shape, [block](void*) { spare_block().put(block); }, options);
}

#else

at::Tensor empty_large(at::IntArrayRef shape, const at::TensorOptions& options) { return at::empty(shape, options); }

#endif

}  // namespace qlorapp::ops
