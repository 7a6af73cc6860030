// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/memory/measured_memory.hpp"
#include "ops/memory_tape.hpp"

namespace qlorapp {

class MeasuredMemory::Counter final : public c10::MemoryReportingInfoBase {
 public:
  explicit Counter(const Options& options) : options_(options), live_(options.before.count), peak_(live_) {}

  void reportMemoryUsage(void* /*memory*/, int64_t bytes, size_t total, size_t /*reserved*/, c10::Device device) override {
    if (device.type() != options_.device) return;
    const std::lock_guard lock(mutex_);
    live_ = options_.device == at::kCPU ? live_ + bytes : static_cast<int64_t>(total);
    peak_ = std::max(peak_, live_);
    if (options_.records) moments_.push_back({ops::current_phase(), {live_}});
  }
  void reportOutOfMemory(int64_t, size_t, size_t, c10::Device) override {}
  bool memoryProfilingEnabled() const override { return true; }

  mutable std::mutex mutex_;  ///< Of what follows: a loader's threads report at the same time.
  const Options options_;
  int64_t live_, peak_;
  std::vector<Moment> moments_;
};

MeasuredMemory::MeasuredMemory(const Options& options)
    : counter_(std::make_shared<Counter>(options)), guard_(c10::DebugInfoKind::PROFILER_STATE, counter_) {
  ops::mark_phase(ops::MemoryPhase::kLoad);
}

MeasuredMemory::~MeasuredMemory() = default;

int64_t MeasuredMemory::live() const {
  const std::lock_guard lock(counter_->mutex_);
  return counter_->live_;
}

int64_t MeasuredMemory::peak() const {
  const std::lock_guard lock(counter_->mutex_);
  return counter_->peak_;
}

void MeasuredMemory::reset_peak() {
  const std::lock_guard lock(counter_->mutex_);
  counter_->peak_ = counter_->live_;
}

std::vector<MeasuredMemory::Moment> MeasuredMemory::moments() const {
  const std::lock_guard lock(counter_->mutex_);
  return counter_->moments_;
}

}  // namespace qlorapp
