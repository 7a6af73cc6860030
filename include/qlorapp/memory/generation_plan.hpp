// SPDX-License-Identifier: Apache-2.0
/// How much memory the answers to prompts take, and how many rows are computed together in a given memory, before a weight is loaded.
///
/// As a plan of training does (planner.hpp), it runs the code of the generation on shapes: the load, the adapter and the cache; the prompts of
/// one pass; one pass of a token per row at the rows' last positions. The size of the cache comes from the function that generate() calls.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "qlorapp/core/units.hpp"
#include "qlorapp/memory/planner.hpp"
#include "qlorapp/nn/sampling.hpp"

namespace qlorapp {

/// Of sampling where a plan does not know its options: the one that takes the most.
inline constexpr double kPlannedTopP = 0.9;

struct GenerationRows {
  std::vector<int64_t> prompts;      ///< Tokens of each, at least one.
  std::vector<int64_t> shared = {};  ///< Of them, stored with an earlier prompt: shared_tokens(). Empty: none.
  int64_t max_new_tokens = 128;      ///< As in GenerateOptions.
  bool fits_positions = false;       ///< The same.
  int64_t max_rows = 128;            ///< The same.
  Bytes cache;                       ///< Of keys and values, at most; 0: as much as fits.
  SamplingOptions sampling = {};     ///< Drawing takes memory, too.
  bool has_adapter = false;          ///< The adapter of PlanSettings::lora is loaded.
};

struct GenerationPlan {
  MemoryPlan memory;    ///< Its phases are load, prompts and decode.
  int64_t rows = 0;     ///< Computed together, at most.
  int64_t longest = 0;  ///< Positions of the longest row.
  Bytes position;       ///< Keys and values of one position, in all layers.
  Bytes cache;          ///< All keys and values: GenerateOptions::cache_bytes.
  Bytes room;           ///< That it was planned for.
};

/// As many rows together as `max_rows`, the prompts and the cache allow, or fewer if only these fit the room. Where not even one does, or a cache
/// of the given size does not, the plan is of that, and memory.fits is false.
/// @param settings  of the model; batch, length and what training alone uses do not count.
/// @param room  for all that torch reserves on a GPU, of all tensors on a CPU.
/// @throws ValueError naming a number that is not positive, or if the longest row is above `rows.cache`.
[[nodiscard]] GenerationPlan plan_generation(const PlanSettings& settings, const GenerationRows& rows, Bytes room);

/// The most rows of this length together that fit the room, up to `most`; 0: not even one.
[[nodiscard]] int64_t largest_rows(const PlanSettings& settings, const GenerationRows& rows, Bytes room, int64_t most);

/// Tokens of each prompt to plan for: as given, or 512, or as many as max_new_tokens leave of the model's positions.
/// @throws ValueError naming the positions that the model has not.
[[nodiscard]] int64_t planned_prompt_tokens(const format::ModelConfig& model, std::optional<int64_t> given, int64_t max_new_tokens);

/// Of a device's memory, what keys, values and the rest may take where no other amount is given: a tenth is for what a plan cannot see.
[[nodiscard]] constexpr Bytes generation_room(Bytes memory) { return {memory.count / 10 * 9}; }

/// @throws ValueError with the plan's numbers and the ways out if it does not fit.
void require_fit(const GenerationPlan& plan, const GenerationRows& rows);

/// "plan: 6.9 GiB at most, in decode (base 5.3 GiB, …)": one line for a log.
[[nodiscard]] std::string summary_line(const GenerationPlan& plan, const PlanSettings& settings);
/// The keys and values in numbers, a line each.
[[nodiscard]] std::string cache_text(const GenerationPlan& plan, const PlanSettings& settings);

}  // namespace qlorapp
