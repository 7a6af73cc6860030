// SPDX-License-Identifier: Apache-2.0
#include "rehearse_merge.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "adapters/adapter_set.hpp"
#include "adapters/merged_weight.hpp"
#include "ops/memory_tape.hpp"
#include "qlorapp/format/model_layout.hpp"
#include "quant/arrival.hpp"
#include "rehearse_load.hpp"

namespace qlorapp {
namespace {

using ops::MemoryTape;
using ops::MemoryUse;
using ops::MemoryUseScope;

at::Tensor made(std::vector<int64_t> shape, at::ScalarType dtype, MemoryUse use) {
  const MemoryUseScope scope(use);
  return at::empty(shape, at::TensorOptions().dtype(dtype).device(kNowhere));
}

/// A tensor that goes through the buffer, converted where its dtype changes.
void copy(at::ScalarType stored, at::ScalarType dtype) {
  const MemoryUseScope scope(MemoryUse::kLoading);
  const at::Tensor buffer = made({kMergeBufferBytes / static_cast<int64_t>(c10::elementSize(stored))}, stored, MemoryUse::kLoading);
  static_cast<void>(buffer.to(dtype));
}

/// One weight of each kind that there is, in the dtype that it has in the checkpoint.
void merge_all(const PlanSettings& settings) {
  const format::ModelConfig& model = settings.model;
  const at::ScalarType dtype = stored_dtype(model);
  std::set<std::tuple<std::vector<int64_t>, int64_t, bool>> done;
  for (const format::Parameter& linear : format::parameters(model, format::Role::kLinear)) {
    const bool is_quantized = model.quantization && !was_skipped(model, linear.name());
    const int64_t rank = settings.lora.matches(linear.module) ? settings.lora.rank_of(linear.module) : 0;
    if ((rank == 0 && !is_quantized) || !done.emplace(linear.shape, rank, is_quantized).second) continue;
    LoraAdapter adapter;
    if (rank > 0) {
      adapter.a = made({rank, linear.shape[1]}, at::kFloat, MemoryUse::kAdapters);
      adapter.b = made({linear.shape[0], rank}, at::kFloat, MemoryUse::kAdapters);
      if (settings.lora.use_dora) adapter.magnitude = made({linear.shape[0]}, at::kFloat, MemoryUse::kAdapters);
    }
    FrozenWeight weight;
    if (is_quantized) {
      const MemoryUseScope scope(MemoryUse::kCodes);
      weight = FrozenWeight(empty_quantized(linear.shape, dtype, options_as_stored(settings), kNowhere));
    } else {
      weight = FrozenWeight(made(linear.shape, dtype, MemoryUse::kLoading));
    }
    static_cast<void>(merged_weight(std::move(weight), rank > 0 ? &adapter : nullptr, nullptr, dtype));
  }
  copy(dtype, dtype);
  if (settings.lora.saves(format::embedding_module(model)) || settings.lora.saves(format::kHeadModule)) copy(at::kFloat, dtype);
}

}  // namespace

PhasePlan rehearse_merge(const PlanSettings& settings) {
  MemoryTape tape;
  {
    const MemoryTape::Recording recording(tape, {.type = at::kCPU, .threads = settings.device.threads});
    const at::NoGradGuard no_grad;
    merge_all(settings);
  }
  PhasePlan plan;
  plan.planned = true;
  MemoryParts parts{};
  Bytes tensors;
  for (const MemoryTape::Event& event : tape.events()) {
    const MemoryTape::Allocation& allocation = tape.allocations()[static_cast<size_t>(event.allocation)];
    const Bytes change{event.begins ? allocation.bytes : -allocation.bytes};
    parts[static_cast<size_t>(allocation.use)] += change;
    tensors += change;
    if (tensors <= plan.tensors) continue;
    plan.tensors = plan.allocated = plan.reserved = tensors;
    plan.parts = parts;
  }
  return plan;
}

}  // namespace qlorapp
