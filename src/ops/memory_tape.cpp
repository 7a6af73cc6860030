// SPDX-License-Identifier: Apache-2.0
#include "ops/memory_tape.hpp"

#include <array>
#include <memory>
#include <mutex>
#include <utility>

#include <c10/core/Allocator.h>

#include "core/check.hpp"

namespace qlorapp::ops {
namespace {

/// The recording of a thread. Tensors hold it too, because they may outlive it.
struct Active {
  MemoryTape* tape = nullptr;  ///< Null when the recording has ended.
  PlannedDevice device;
};

thread_local std::shared_ptr<Active> active;
thread_local MemoryPhase marked = MemoryPhase::kLoad;

/// What a Meta storage points to instead of memory.
struct Counted {
  std::shared_ptr<Active> recording;
  int64_t allocation;
};

void release(void* context) {
  const std::unique_ptr<Counted> counted(static_cast<Counted*>(context));
  if (counted->recording->tape != nullptr) counted->recording->tape->end(counted->allocation);
}

/// Torch's Meta allocator, but for threads that record.
class CountingAllocator final : public c10::Allocator {
 public:
  explicit CountingAllocator(c10::Allocator* original) : original_(original) {}

  c10::DataPtr allocate(size_t bytes) override {
    if (!active || bytes == 0) return original_->allocate(bytes);
    auto counted = std::make_unique<Counted>(Counted{active, active->tape->begin(static_cast<int64_t>(bytes))});
    return {nullptr, counted.release(), &release, at::Device(at::kMeta)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return original_->raw_deleter(); }
  void copy_data(void*, const void*, size_t) const override {}

 private:
  c10::Allocator* original_;
};

/// For good: tensors of an ended recording still come back to it.
void install_allocator() {
  static std::once_flag once;
  std::call_once(once, [] {
    static auto* const allocator = new CountingAllocator(c10::GetAllocator(at::kMeta));
    c10::SetAllocator(at::kMeta, allocator, /*priority=*/1);
  });
}

}  // namespace

std::string_view to_string(MemoryUse use) {
  static constexpr std::array<std::string_view, kMemoryUseCount> kNames{"4-bit codes",
                                                                        "scales",
                                                                        "embedding, head, norms",
                                                                        "adapters",
                                                                        "gradients",
                                                                        "optimizer state",
                                                                        "library workspace",
                                                                        "batch, rotary tables",
                                                                        "kept for backward",
                                                                        "activations",
                                                                        "dequantized weights",
                                                                        "attention workspace",
                                                                        "logits",
                                                                        "keys and values",
                                                                        "load buffers"};
  return kNames[static_cast<size_t>(use)];
}

std::string_view to_string(MemoryPhase phase) {
  static constexpr std::array<std::string_view, kMemoryPhaseCount> kNames{
      "load", "forward", "loss", "backward", "optimizer step", "evaluation", "prompts", "decode", "merge"};
  return kNames[static_cast<size_t>(phase)];
}

MemoryTape::Recording::Recording(MemoryTape& tape, const PlannedDevice& device) {
  QLORAPP_CHECK_VALUE(!active, "[memory_tape] this thread records already. Finish that plan first.");
  install_allocator();
  active = std::make_shared<Active>(Active{&tape, device});
}

MemoryTape::Recording::~Recording() {
  active->tape = nullptr;
  active.reset();
}

int64_t MemoryTape::begin(int64_t bytes) {
  const auto allocation = static_cast<int64_t>(allocations_.size());
  allocations_.push_back({bytes, use_, phase_});
  events_.push_back({allocation, true, phase_});
  return allocation;
}

void MemoryTape::end(int64_t allocation) { events_.push_back({allocation, false, phase_}); }

void MemoryTape::label(const at::Tensor& tensor, MemoryUse use) {
  if (!tensor.defined() || !tensor.is_meta()) return;
  const c10::DataPtr& memory = tensor.storage().data_ptr();
  if (memory.get_deleter() != &release) return;
  const auto* const counted = static_cast<const Counted*>(memory.get_context());
  if (counted != nullptr && counted->recording->tape == this) label(counted->allocation, use);
}

const PlannedDevice* planned_device() { return active ? &active->device : nullptr; }

bool computes_on_gpu(at::Device device) {
  return device.is_cuda() || (device.is_meta() && active && active->device.type == at::kCUDA);
}

bool computes_on_gpu(const at::Tensor& tensor) { return computes_on_gpu(tensor.device()); }

void mark_phase(MemoryPhase phase) {
  marked = phase;
  if (active) active->tape->phase_ = phase;
}

MemoryPhase current_phase() { return marked; }

MemoryUseScope::MemoryUseScope(MemoryUse use) : tape_(active ? active->tape : nullptr) {
  if (tape_ != nullptr) before_ = std::exchange(tape_->use_, use);
}

MemoryUseScope::~MemoryUseScope() {
  if (tape_ != nullptr) tape_->use_ = before_;
}

}  // namespace qlorapp::ops
