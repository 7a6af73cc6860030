// SPDX-License-Identifier: Apache-2.0
/// How much memory a run will take, before any of it is taken.
///
/// The run's own code is executed on shapes (ops/memory_tape.hpp): the weights are made, quantized and dropped in the order of
/// the loader, one micro-batch goes forward and backward, the optimizer steps, one batch is evaluated. Every allocation is
/// seen, so the plan has no formula of its own that could differ from the code, and no constant that was fitted to a
/// measurement. On top come the rules of torch's caching allocator (caching_allocator.hpp) and what is not torch's: the CUDA
/// context, which is measured once on a machine and stated, never guessed.
///
/// A plan takes some milliseconds per block; nothing of the model's size is allocated.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>

#include "qlorapp/adapters/lora_config.hpp"
#include "qlorapp/core/units.hpp"
#include "qlorapp/format/model_config.hpp"
#include "qlorapp/nn/keep.hpp"
#include "qlorapp/nn/memory_settings.hpp"
#include "qlorapp/ops/planned_device.hpp"
#include "qlorapp/quant/quantizer.hpp"

namespace qlorapp {

/// All that memory depends on. A new setting of the step is one more line here and one in planner.cpp, which passes it to the model.
struct PlanSettings {
  format::ModelConfig model = {};
  LoraConfig lora = {};
  bool load_in_4bit = true;  ///< Of a checkpoint that is not quantized yet.
  Quantizer::Options quantization = {};
  bool keep_blocks = true;                     ///< As in WeightOptions.
  std::vector<std::string> skip_modules = {};  ///< Linear layers left dense.
  at::ScalarType compute_dtype = at::kFloat;   ///< Activations, norms, embedding, head.
  int64_t batch = 1;                           ///< Rows of a micro-batch.
  int64_t length = 1024;     ///< Tokens of each: the longest row counts, all rows as long as it is the worst case.
  int64_t accumulation = 1;  ///< Micro-batches whose tokens wait on the device together.
  int64_t eval_batch = 0;    ///< Rows of a batch in evaluation; 0: there is none.
  bool optimizer_is_8bit = false;
  bool optimizer_is_paged = false;  ///< Moments give way to the host where a step does not fit beside them (train/paged_state.hpp).
  bool deterministic = false;       ///< full_determinism: attention's backward pass adds up in one order, in more memory.
  bool float8 = false;              ///< Frozen weights are multiplied in eight bits.
  std::vector<Segment> segments = {};  ///< Kept activations; empty: everything.
  MemorySettings memory = {};
  int64_t base_shards = 1;  ///< Ranks that hold a shard of the base each (base_sharding); 1: each has all of them.
  ops::PlannedDevice device = {};
};

using MemoryParts = std::array<Bytes, ops::kMemoryUseCount>;  ///< By MemoryUse.
/// Over all uses.
[[nodiscard]] Bytes sum(const MemoryParts& parts);

/// The fullest moment of a phase.
struct PhasePlan {
  bool planned = false;  ///< false: the run has no such phase.
  Bytes tensors;         ///< All that is alive, as asked for.
  MemoryParts parts;     ///< The same by use.
  Bytes allocated;       ///< As torch counts it: rounded by the caching allocator on a GPU (max_memory_allocated).
  Bytes reserved;        ///< Taken from the driver by then (max_memory_reserved); on a CPU the same as allocated.
};

/// One moment of the planned timeline.
struct TimelinePoint {
  ops::MemoryPhase phase;
  MemoryParts parts;
};

struct MemoryPlan {
  bool fits = true;                ///< In the room that was asked for.
  bool optimizer_on_host = false;  ///< Paged moments had to give way for that.
  /// By MemoryPhase. The merge of the adapter (io/merge.hpp, with its defaults) comes after the run and takes host memory:
  /// it is in no peak below, in no room, and not in the timeline.
  std::array<PhasePlan, ops::kMemoryPhaseCount> phases;
  std::vector<TimelinePoint> timeline;  ///< From the end of the load on; the fullest moments are all in it.
  Bytes pinned_host;                    ///< Beside a GPU: inputs kept on the host, paged moments, an embedding that waits there.
  int64_t trainable_parameters = 0;
  int64_t base_parameters = 0;

  [[nodiscard]] const PhasePlan& of(ops::MemoryPhase phase) const { return phases[static_cast<size_t>(phase)]; }
  /// The fullest phase of the run, and of those that training repeats (all but the load).
  [[nodiscard]] ops::MemoryPhase fullest() const;
  [[nodiscard]] ops::MemoryPhase fullest_of_training() const;
  [[nodiscard]] Bytes peak_allocated() const { return of(fullest()).allocated; }
  /// In use at the fullest moment of the phases that training repeats.
  [[nodiscard]] Bytes training_peak() const { return of(fullest_of_training()).allocated; }
  /// Bytes that the caching allocator holds in the fullest phase; at least peak_allocated().
  [[nodiscard]] Bytes peak_reserved() const;
};

/// @throws ValueError naming the setting: a size that is not positive, a batch or length whose products leave 64 bits, adapters
///         that match no layer, segments that do not cover the blocks.
/// @param room  of torch's allocator on a GPU, of all tensors on a CPU; none: without end. Where it is short the allocator frees
///              its cache, so less may be reserved than with more room. Paged moments wait on the host if it fits
///              only so. The plan ends where something does not fit.
[[nodiscard]] MemoryPlan plan_memory(const PlanSettings& settings, std::optional<Bytes> room = std::nullopt);

/// The same, but whole where it does not fit: then without end, and `fits` is false.
[[nodiscard]] MemoryPlan plan_memory_in(const PlanSettings& settings, Bytes room);

/// "plan: 6.9 GiB at most, in the backward pass (4-bit base 3.4, …); …": one line for a log.
[[nodiscard]] std::string summary_line(const MemoryPlan& plan, const PlanSettings& settings);

}  // namespace qlorapp
