// SPDX-License-Identifier: Apache-2.0
/// Bytes that torch's CPU allocator has handed out, as its own profiler hook sees them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

namespace qlorapp {

/// Counts from its construction to its end, in the thread that made it and in those that it starts.
class MeasuredMemory {
 public:
  MeasuredMemory() : counter_(std::make_shared<Counter>()), guard_(c10::DebugInfoKind::PROFILER_STATE, counter_) {}

  [[nodiscard]] int64_t live() const { return counter_->live; }
  [[nodiscard]] int64_t peak() const { return counter_->peak; }
  void reset_peak() { counter_->peak = counter_->live; }

 private:
  struct Counter final : c10::MemoryReportingInfoBase {
    int64_t live = 0, peak = 0;
    void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device device) override {
      if (!device.is_cpu()) return;
      live += bytes;
      peak = std::max(peak, live);
    }
    void reportOutOfMemory(int64_t, size_t, size_t, c10::Device) override {}
    bool memoryProfilingEnabled() const override { return true; }
  };
  std::shared_ptr<Counter> counter_;
  c10::DebugInfoGuard guard_;
};

}  // namespace qlorapp
