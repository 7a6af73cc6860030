// SPDX-License-Identifier: Apache-2.0
/// Runs the library's own code without data and writes down what it allocates.
///
///     MemoryTape tape;
///     {
///       const MemoryTape::Recording recording(tape, {.type = at::kCUDA, .architecture = 90});
///       …                                  // anything, on tensors of the Meta device
///     }
///     tape.events();                       // every allocation and its end, in order
///
/// A plan that repeats the shapes of the code that allocates drifts away from it. So nothing is repeated: tensors of torch's
/// Meta device have shapes and no memory, the code that trains runs on them as it is, and the Meta allocator, replaced by one
/// that counts, sees every request and every release. What an operator takes beside its results on the planned device (a
/// dequantized weight, the logits of a chunk, the buffers of an attention kernel), its Meta implementation takes, too, while a
/// tape records; otherwise, as when torch traces, it takes nothing.
///
/// A recording belongs to its thread. Tensors may outlive it; the tape must outlive the recording.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "qlorapp/ops/planned_device.hpp"

namespace qlorapp::ops {

class MemoryTape {
 public:
  struct Allocation {
    int64_t bytes = 0;  ///< As asked for; no allocator's rounding.
    MemoryUse use = MemoryUse::kActivation;
    MemoryPhase phase = MemoryPhase::kLoad;  ///< In which it was made.
  };
  struct Event {
    int64_t allocation = 0;  ///< Index into allocations().
    bool begins = true;
    MemoryPhase phase = MemoryPhase::kLoad;
  };

  class Recording {
   public:
    Recording(MemoryTape& tape, const PlannedDevice& device);
    ~Recording();
    Recording(const Recording&) = delete;
    Recording& operator=(const Recording&) = delete;
  };

  [[nodiscard]] const std::vector<Allocation>& allocations() const { return allocations_; }
  [[nodiscard]] const std::vector<Event>& events() const { return events_; }

  /// Labels the memory of a tensor after the fact. Nothing for one that this tape has not seen.
  void label(const at::Tensor& tensor, MemoryUse use);
  void label(int64_t allocation, MemoryUse use) { allocations_[static_cast<size_t>(allocation)].use = use; }

  /// Called by the allocator.
  [[nodiscard]] int64_t begin(int64_t bytes);
  void end(int64_t allocation);

 private:
  friend class MemoryUseScope;
  friend void mark_phase(MemoryPhase phase);
  std::vector<Allocation> allocations_;
  std::vector<Event> events_;
  MemoryUse use_ = MemoryUse::kActivation;
  MemoryPhase phase_ = MemoryPhase::kLoad;
};

/// The device of this thread's recording; null outside of one.
[[nodiscard]] const PlannedDevice* planned_device();

/// Whether a GPU computes with this tensor: it is there, or on Meta while a GPU is planned for. Code that does something else on a
/// GPU asks this.
[[nodiscard]] bool computes_on_gpu(const at::Tensor& tensor);
[[nodiscard]] bool computes_on_gpu(at::Device device);

/// From here on this thread's run is at another phase, for its recording if there is one and for who measures it.
void mark_phase(MemoryPhase phase);
/// Of this thread; kLoad until it is marked.
[[nodiscard]] MemoryPhase current_phase();

/// Labels the allocations made while it lives. Nothing outside of a recording.
class MemoryUseScope {
 public:
  explicit MemoryUseScope(MemoryUse use);
  ~MemoryUseScope();
  MemoryUseScope(const MemoryUseScope&) = delete;
  MemoryUseScope& operator=(const MemoryUseScope&) = delete;

 private:
  MemoryTape* tape_;
  MemoryUse before_ = MemoryUse::kActivation;
};

}  // namespace qlorapp::ops
