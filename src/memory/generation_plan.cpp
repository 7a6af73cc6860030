// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/memory/generation_plan.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>

#include "core/check.hpp"
#include "largest.hpp"
#include "nn/decoder.hpp"
#include "nn/generation_cache.hpp"
#include "nn/generation_size.hpp"
#include "qlorapp/nn/causal_lm.hpp"
#include "qlorapp/nn/generate.hpp"
#include "rehearse_load.hpp"
#include "replay.hpp"
#include "report_text.hpp"

namespace qlorapp {
namespace {

using namespace report;
using ops::MemoryTape;

constexpr Bytes kNoLimit{std::numeric_limits<int64_t>::max()};

void check(const GenerationRows& rows) {
  QLORAPP_CHECK_VALUE(!rows.prompts.empty() && std::ranges::min(rows.prompts) >= 1,
                      "[plan] each prompt must have at least one token. Give the tokens of the prompts.");
  QLORAPP_CHECK_VALUE(rows.max_new_tokens >= 1, "[plan] max_new_tokens must be at least 1; got {}.", rows.max_new_tokens);
  QLORAPP_CHECK_VALUE(rows.max_rows >= 1, "[plan] max_rows must be at least 1; got {}.", rows.max_rows);
  constexpr int64_t kMostTokens = int64_t{1} << 40;
  for (const int64_t count : {std::ranges::max(rows.prompts), rows.max_new_tokens, rows.max_rows}) {
    QLORAPP_CHECK_VALUE(count <= kMostTokens, "[plan] tokens and rows must be at most 2^40; got {}. Give smaller sizes.", count);
  }
  QLORAPP_CHECK_VALUE(rows.shared.empty() || rows.shared.size() == rows.prompts.size(),
                      "[plan] shared must be empty or have a number for each of the {} prompts; got {}.", rows.prompts.size(),
                      rows.shared.size());
  for (size_t row = 0; row < rows.shared.size(); ++row) {
    QLORAPP_CHECK_VALUE(rows.shared[row] >= 0 && rows.shared[row] < rows.prompts[row],
                        "[plan] shared[{}] must be from 0 to {}, fewer than the prompt's tokens; got {}.", row,
                        rows.prompts[row] - 1, rows.shared[row]);
  }
  rows.sampling.validate();
}

std::vector<int64_t> positions_of(const PlanSettings& settings, const GenerationRows& rows) {
  GenerateOptions options;
  options.max_new_tokens = rows.max_new_tokens;
  std::vector<int64_t> positions;
  for (const int64_t prompt : rows.prompts)
    positions.push_back(prompt + (rows.fits_positions ? new_tokens_of(settings.model, prompt, options) : rows.max_new_tokens));
  return positions;
}

/// Positions that a row does not have in slots of another.
std::vector<int64_t> slots_of(const PlanSettings& settings, const GenerationRows& rows) {
  std::vector<int64_t> slots = positions_of(settings, rows);
  for (size_t row = 0; row < rows.shared.size(); ++row) slots[row] -= rows.shared[row];
  return slots;
}

/// Of one pass the fullest: the longest prompt and the largest others that it may compute with it.
std::vector<int64_t> first_prompts(std::vector<int64_t> prompts, int64_t rows) {
  std::ranges::sort(prompts, std::greater<>());
  std::vector<int64_t> chosen;
  int64_t tokens = 0;
  for (const int64_t prompt : prompts) {
    if (std::ssize(chosen) == rows) break;
    if (!chosen.empty() && tokens + prompt > kTokensAtOnce) continue;
    chosen.push_back(prompt);
    tokens += prompt;
  }
  return chosen;
}

/// Runs the load, a pass of prompts and one of a token per row, and keeps the tape.
class Rehearsal {
 public:
  Rehearsal(const PlanSettings& settings, const GenerationRows& rows, const GenerationSize& size) : rows_(rows) {
    const MemoryTape::Recording recording(tape, settings.device);
    const at::NoGradGuard no_grad;
    CausalLM model = rehearse_load(settings, tape);
    base_parameters = model.decoder().parameter_count();
    if (rows.has_adapter) {
      model.add_adapters(settings.lora, 0);
      tape.label(model.arena().values(), MemoryUse::kAdapters);
      tape.label(model.arena().gradients(), MemoryUse::kGradients);
      trainable_parameters = model.arena().numel();
    }
    loaded_events = tape.events().size();
    ops::mark_phase(MemoryPhase::kPrefill);
    const at::Tensor library = rehearse_library(settings.device, tape);
    GenerationCache cache =
        make_cache(model, size.rows, size.longest, size.slots);  // all rows in one place: shapes overwrite nothing
    for (const KeyValueCache& block : cache.blocks) {
      tape.label(block.keys, MemoryUse::kCache);
      tape.label(block.values, MemoryUse::kCache);
    }
    cache.adapters_are_constant = true;
    if (rows.sampling.repetition_penalty != 1.0) seen_ = at::empty({size.rows, settings.model.vocab_size}, of(at::kBool));
    tape.label(seen_, MemoryUse::kLogits);
    pass(model, cache, first_prompts(rows.prompts, size.rows), 0);
    ops::mark_phase(MemoryPhase::kDecode);
    cache.lengths.assign(cache.lengths.size(), size.longest - 1);
    pass(model, cache, std::vector<int64_t>(static_cast<size_t>(size.rows), 1), rows.max_new_tokens - 1);
    events = tape.events().size();
  }

  MemoryTape tape;
  size_t loaded_events = 0, events = 0;
  int64_t base_parameters = 0, trainable_parameters = 0;

 private:
  static at::TensorOptions of(at::ScalarType dtype) { return at::TensorOptions().dtype(dtype).device(kNowhere); }

  void pass(CausalLM& model, GenerationCache& cache, const std::vector<int64_t>& counts, int64_t position) {
    std::vector<int64_t> numbers(counts.size());
    std::iota(numbers.begin(), numbers.end(), int64_t{0});
    const at::Tensor tokens = at::empty({std::accumulate(counts.begin(), counts.end(), int64_t{0})}, of(at::kLong));
    tape.label(tokens, MemoryUse::kBatch);
    const at::Tensor hidden = forward_cached(model, tokens, numbers, counts, cache);
    const ops::MemoryUseScope use(MemoryUse::kLogits);
    const at::Tensor logits = model.logits(hidden);
    const at::Tensor seen = seen_.defined() ? at::empty({std::ssize(counts), seen_.size(1)}, seen_.options()) : at::Tensor();
    const at::Tensor scores = warped_logits(logits, seen, {}, rows_.sampling);
    static_cast<void>(choose_tokens(scores, numbers, std::vector<int64_t>(counts.size(), position), rows_.sampling));
  }

  const GenerationRows& rows_;
  at::Tensor seen_;
};

/// @param together  rows that may be computed together.
GenerationPlan plan_rows(const PlanSettings& settings, const GenerationRows& rows, int64_t together, Bytes room, bool whole) {
  const Bytes position = cache_per_position(settings.model, settings.compute_dtype);
  const GenerationSize size =
      generation_size(std::ranges::max(positions_of(settings, rows)), slots_of(settings, rows), rows.max_new_tokens,
                      std::min(together, rows.max_rows), position, rows.cache.count > 0 ? rows.cache : kNoLimit);
  const Rehearsal rehearsal(settings, rows, size);
  const auto replayed = [&](std::optional<Bytes> limit) {
    return replay(rehearsal.tape, rehearsal.loaded_events, rehearsal.events, settings.device, limit);
  };
  GenerationPlan plan{.memory = replayed(room),
                      .rows = size.rows,
                      .longest = size.longest,
                      .position = position,
                      .cache = position * size.slots,
                      .room = room};
  if (!plan.memory.fits && whole) {
    plan.memory = replayed(std::nullopt);
    plan.memory.fits = false;
  }
  plan.memory.base_parameters = rehearsal.base_parameters;
  plan.memory.trainable_parameters = rehearsal.trainable_parameters;
  return plan;
}

}  // namespace

int64_t planned_prompt_tokens(const format::ModelConfig& model, std::optional<int64_t> given, int64_t max_new_tokens) {
  constexpr int64_t kUsual = 512;
  const int64_t positions = position_limit(model), room = positions - max_new_tokens;
  QLORAPP_CHECK_VALUE(room >= given.value_or(1),
                      "[plan] prompt_tokens ({}) and max_new_tokens ({}) must fit the model's {} positions. Lower one of them.",
                      given.value_or(1), max_new_tokens, positions);
  return given.value_or(std::min(kUsual, room));
}

GenerationPlan plan_generation(const PlanSettings& settings, const GenerationRows& rows, Bytes room) {
  check(rows);
  const int64_t most = std::min(rows.max_rows, std::ssize(rows.prompts));
  GenerationPlan plan = plan_rows(settings, rows, most, room, /*whole=*/rows.cache.count > 0 || most == 1);
  if (plan.memory.fits || rows.cache.count > 0 || most == 1) return plan;
  const int64_t together =
      largest_that(most - 1, [&](int64_t count) { return plan_rows(settings, rows, count, room, /*whole=*/false).memory.fits; });
  return plan_rows(settings, rows, std::max<int64_t>(together, 1), room, /*whole=*/true);
}

int64_t largest_rows(const PlanSettings& settings, const GenerationRows& rows, Bytes room, int64_t most) {
  check(rows);
  const int64_t longest = std::ranges::max(rows.prompts);
  return largest_that(most, [&](int64_t count) {
    GenerationRows tried = rows;
    tried.prompts.assign(static_cast<size_t>(count), longest);
    tried.max_rows = count;
    tried.cache = {};
    return plan_rows(settings, tried, count, room, /*whole=*/false).memory.fits;
  });
}

namespace {

Bytes base_of(const MemoryParts& parts) { return parts_of(parts, {MemoryUse::kCodes, MemoryUse::kScales, MemoryUse::kDense}); }
std::string rows_text(const GenerationPlan& plan) { return plan.rows == 1 ? "a row" : message("{} rows", plan.rows); }
Bytes adapters_of(const MemoryParts& parts) { return parts_of(parts, {MemoryUse::kAdapters, MemoryUse::kGradients}); }

}  // namespace

void require_fit(const GenerationPlan& plan, const GenerationRows& rows) {
  if (plan.memory.fits) return;
  const PhasePlan& fullest = plan.memory.of(plan.memory.fullest());
  const Bytes base = base_of(fullest.parts), adapters = adapters_of(fullest.parts), cache = part(fullest.parts, MemoryUse::kCache);
  const Bytes rest = fullest.allocated - base - adapters - cache;
  throw ValueError(message(
      "[generate] {} of up to {} positions need {} with the model (base {}, adapters {}, keys and values {}, other {}); {} may be "
      "used. {}Shorten the prompts, lower max_new_tokens ({}), or choose a device with more memory.",
      rows_text(plan), plan.longest, to_string(plan.memory.peak_reserved()), to_string(base), to_string(adapters), to_string(cache),
      to_string(rest), to_string(plan.room), rows.cache.count > 0 ? "Lower or leave out cache_memory. " : "", rows.max_new_tokens));
}

std::string summary_line(const GenerationPlan& plan, const PlanSettings& settings) {
  const MemoryPhase phase = plan.memory.fullest();
  const PhasePlan& fullest = plan.memory.of(phase);
  const Bytes base = base_of(fullest.parts), adapters = adapters_of(fullest.parts);
  const Bytes cache = part(fullest.parts, MemoryUse::kCache), logits = part(fullest.parts, MemoryUse::kLogits);
  return message(
      "plan: {} at most in {}, in {} (base {}, adapters {}, keys and values {}, logits {}, other {}) for {} x {} positions",
      to_string(fullest.allocated), dtype_name(settings.compute_dtype), ops::to_string(phase), to_string(base), to_string(adapters),
      to_string(cache), to_string(logits), to_string(fullest.allocated - base - adapters - cache - logits), plan.rows,
      plan.longest);
}

std::string cache_text(const GenerationPlan& plan, const PlanSettings& settings) {
  const format::ModelConfig& model = settings.model;
  return message(
      "keys and values: {} per token (2 x {} layers x {} heads x {} elements x {} bytes), {} per row of {} positions\n"
      "cache_memory: {}, {} at once\n",
      to_string(plan.position), model.num_hidden_layers, model.num_key_value_heads, model.head_dim,
      c10::elementSize(settings.compute_dtype), to_string(plan.position * plan.longest), plan.longest, to_string(plan.cache),
      rows_text(plan));
}

}  // namespace qlorapp
