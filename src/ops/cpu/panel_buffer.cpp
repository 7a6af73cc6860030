// SPDX-License-Identifier: Apache-2.0
#include "panel_buffer.hpp"

#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

#include "core/check.hpp"
#include "ops/operator.hpp"

namespace qlorapp::ops::cpu {

void* panel_buffer(size_t bytes) {
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  thread_local std::unique_ptr<void, Free> buffer;
  thread_local size_t capacity = 0;
  if (bytes > capacity) {
    capacity = (bytes + 4095) / 4096 * 4096;
    buffer.reset(std::aligned_alloc(4096, capacity));
    if (buffer == nullptr) {
      const std::string text = message("[linear_4bit] no memory for a panel of {} bytes.", std::exchange(capacity, 0));
      throw KernelOutOfMemory({__func__, __FILE__, __LINE__}, text);
    }
  }
  return buffer.get();
}

}  // namespace qlorapp::ops::cpu
