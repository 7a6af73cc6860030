// SPDX-License-Identifier: Apache-2.0
/// Bytes that torch's allocator has handed out, as its own profiler hook sees them: on a CPU each request, on a GPU what
/// the caching allocator counts (torch.cuda.memory_allocated).
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include "qlorapp/core/units.hpp"
#include "qlorapp/ops/planned_device.hpp"

namespace qlorapp {

/// Counts from its construction to its end, in the thread that made it and in those that are handed its state
/// (at::ThreadLocalState: a loader's, the autograd engine's). One at a time in a thread, and not beside torch's profiler.
class MeasuredMemory {
 public:
  /// In use after one request or release, and what the run was at: nn marks its phases (ops::mark_phase).
  struct Moment {
    ops::MemoryPhase phase;
    Bytes in_use;
  };
  struct Options {
    at::DeviceType device = at::kCPU;
    Bytes before{};        ///< In use already: the hook knows nothing of it on a CPU, and on a GPU only from the first request on.
    bool records = false;  ///< Keep every moment.
  };

  MeasuredMemory() : MeasuredMemory(Options{}) {}
  explicit MeasuredMemory(const Options& options);
  ~MeasuredMemory();
  MeasuredMemory(const MeasuredMemory&) = delete;
  MeasuredMemory& operator=(const MeasuredMemory&) = delete;

  /// In bytes.
  [[nodiscard]] int64_t live() const;
  [[nodiscard]] int64_t peak() const;
  /// The peak is what is live now.
  void reset_peak();
  /// From the construction on, in order; empty unless options.records.
  [[nodiscard]] std::vector<Moment> moments() const;

 private:
  class Counter;
  std::shared_ptr<Counter> counter_;
  c10::DebugInfoGuard guard_;
};

}  // namespace qlorapp
