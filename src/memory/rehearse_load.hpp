// SPDX-License-Identifier: Apache-2.0
/// Loading a checkpoint without one: by the arrangement and the buffers of those who load (nn/arriving_weights.hpp).
#pragma once

#include <string>

#include "ops/memory_tape.hpp"
#include "qlorapp/memory/planner.hpp"
#include "qlorapp/nn/causal_lm.hpp"

namespace qlorapp {

/// Tensors of the planner have shapes alone.
constexpr at::DeviceType kNowhere = at::kMeta;

/// Of the checkpoint's weights, bfloat16 where config.json does not say.
[[nodiscard]] at::ScalarType stored_dtype(const format::ModelConfig& config);
/// Whether the checkpoint's config leaves it dense: by a module's whole name or a part of it, cut at dots.
[[nodiscard]] bool was_skipped(const format::ModelConfig& config, const std::string& weight);

/// Of a checkpoint that is quantized already. @pre settings.model.quantization.
[[nodiscard]] Quantizer::Options options_as_stored(const PlanSettings& settings);

/// The workspace that cuBLAS keeps; undefined on a CPU.
[[nodiscard]] at::Tensor rehearse_library(const ops::PlannedDevice& device, ops::MemoryTape& tape);

/// @pre `tape` records on this thread, for settings.device.
[[nodiscard]] CausalLM rehearse_load(const PlanSettings& settings, ops::MemoryTape& tape);

}  // namespace qlorapp
