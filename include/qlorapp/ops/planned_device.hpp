// SPDX-License-Identifier: Apache-2.0
/// Terms of a memory plan: the device it is made for, the uses of memory and the phases of a run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include <c10/core/DeviceType.h>

namespace qlorapp::ops {

/// The device that a recording stands for.
struct PlannedDevice {
  c10::DeviceType type = c10::DeviceType::CPU;
  int64_t architecture = 0;         ///< 75 for a T4, 90 for an H200; 0 for a CPU.
  int64_t threads = 1;              ///< Of a CPU: some of its kernels have a buffer a thread.
  int64_t multiprocessors = 0;      ///< Of a GPU: gradients of the same bits in every run are added up by as many as there are.
  bool expandable_segments = true;  ///< Of torch's allocator on a GPU (ops/device_memory.hpp).
};

/// The purpose of memory, one row each in a plan. Code that allocates names its purpose; the default is an activation.
enum class MemoryUse : uint8_t {
  kCodes,        ///< Four-bit codes of the base.
  kScales,       ///< Scales of the codes' blocks, both levels.
  kDense,        ///< Weights that are not quantized: embedding, head, norms.
  kAdapters,     ///< float32 values of the adapters.
  kGradients,    ///< The same for their gradients.
  kOptimizer,    ///< Moments.
  kLibrary,      ///< Workspaces that cuBLAS keeps.
  kBatch,        ///< Tokens, targets, positions, rotary tables.
  kKept,         ///< Activations kept for backward.
  kActivation,   ///< Inputs and outputs of operators while they are needed.
  kDequantized,  ///< A weight, or a stack of them with their adapters, in the compute dtype.
  kAttention,    ///< Temporary memory of an attention kernel.
  kLogits,       ///< Rows of logits and temporary memory of the loss.
  kCache,        ///< Keys and values of the rows that are generated.
  kLoading,      ///< Buffers that a load reads through; during a merge, a weight as its file stores it.
};
constexpr size_t kMemoryUseCount = 15;
/// The name of a row in a plan.
[[nodiscard]] std::string_view to_string(MemoryUse use);

/// Parts of a run, in the order of the first step; of a generation the load, the prompts and the passes of one token a row. The last one comes
/// after training, in host memory, and is a run of its own.
enum class MemoryPhase : uint8_t { kLoad, kForward, kLoss, kBackward, kOptimizer, kEvaluation, kPrefill, kDecode, kMerge };
constexpr size_t kMemoryPhaseCount = 9;
/// The name of a column in a plan.
[[nodiscard]] std::string_view to_string(MemoryPhase phase);

}  // namespace qlorapp::ops
