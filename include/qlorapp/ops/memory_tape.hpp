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

namespace qlorapp::ops {

/// The device that a recording stands for.
struct PlannedDevice {
  at::DeviceType type = at::kCPU;
  int64_t architecture = 0;         ///< 75 for a T4, 90 for an H200; 0 for a CPU.
  int64_t threads = 1;              ///< Of a CPU: some of its kernels have a buffer a thread.
  int64_t multiprocessors = 0;      ///< Of a GPU: gradients of the same bits in every run are added up by as many as there are.
  bool expandable_segments = true;  ///< Of torch's allocator on a GPU (ops/device_memory.hpp).
};

/// What memory is for. Code that takes memory says so where it is worth a row of its own; the rest is an activation.
enum class MemoryUse : uint8_t {
  kCodes,        ///< Four-bit codes of the base.
  kScales,       ///< Scales of the codes' blocks, both levels.
  kDense,        ///< Weights that are not quantized: embedding, head, norms.
  kAdapters,     ///< float32 values of the adapters.
  kGradients,    ///< The same for their gradients.
  kOptimizer,    ///< Moments.
  kLibrary,      ///< Workspaces that cuBLAS keeps.
  kBatch,        ///< Tokens, targets, positions, rotary tables.
  kKept,         ///< What forward leaves for backward.
  kActivation,   ///< Inputs and outputs of operators while they are needed.
  kDequantized,  ///< A weight, or a stack of them with their adapters, in the compute dtype.
  kAttention,    ///< What an attention kernel takes beside its results.
  kLogits,       ///< Rows of logits and what the loss needs beside them.
  kLoading,      ///< What a checkpoint's weights come and go through: buffers of a load, a weight of a merge as it is stored.
};
constexpr size_t kMemoryUseCount = 14;
[[nodiscard]] std::string_view to_string(MemoryUse use);

/// Parts of a run, in the order of the first step. The last one comes after training, in host memory, and is a run of its own.
enum class MemoryPhase : uint8_t { kLoad, kForward, kLoss, kBackward, kOptimizer, kEvaluation, kMerge };
constexpr size_t kMemoryPhaseCount = 7;
[[nodiscard]] std::string_view to_string(MemoryPhase phase);

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
  [[nodiscard]] int64_t live_bytes() const { return live_; }

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
  int64_t live_ = 0;
  MemoryUse use_ = MemoryUse::kActivation;
  MemoryPhase phase_ = MemoryPhase::kLoad;
};

/// The device of this thread's recording; null outside of one.
[[nodiscard]] const PlannedDevice* planned_device();

/// Whether what is computed with this tensor is computed by a GPU: it is there, or on Meta while a GPU is planned for. To be
/// asked wherever code chooses another way for GPUs.
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
