// SPDX-License-Identifier: Apache-2.0
// The plan of answering prompts beside what torch's allocator hands out while a model on a CPU really answers them.
#include "qlorapp/memory/generation_plan.hpp"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <string>
#include <vector>

#include "catch.hpp"
#include "core/check.hpp"
#include "format/expect_error.hpp"
#include "plan_settings.hpp"
#include "qlorapp/io/load_model.hpp"
#include "qlorapp/memory/measured_memory.hpp"
#include "qlorapp/nn/generate.hpp"
#include "small_checkpoint.hpp"

using namespace qlorapp;
using ops::MemoryPhase;
using ops::MemoryUse;

namespace {

constexpr Bytes kEndless{int64_t{1} << 50};

struct AnswerCase {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  GenerationRows rows;
  bool load_in_4bit = true;
  bool is_exact = true;  ///< To the byte, of float32: oneDNN's products in 16 bits have scratch of their own.
};

GenerationRows rows_of(std::vector<int64_t> prompts, int64_t max_new_tokens) {
  GenerationRows rows;
  rows.prompts = std::move(prompts);
  rows.max_new_tokens = max_new_tokens;
  return rows;
}

PlanSettings settings_for(const std::string& folder, const AnswerCase& c) {
  PlanSettings settings;
  settings.model = format::load_model_config(folder);
  settings.lora.target_modules = NamesOrPattern("all-linear");
  settings.compute_dtype = c.dtype;
  settings.load_in_4bit = c.load_in_4bit;
  settings.device.threads = at::get_num_threads();
  return settings;
}

GenerateOptions options_of(const GenerationRows& rows) {
  GenerateOptions options;
  options.max_new_tokens = rows.max_new_tokens;
  options.max_rows = rows.max_rows;
  options.sampling = rows.sampling;
  return options;
}

/// The model with its adapter, and the peak of the answers.
std::pair<int64_t, int64_t> measure_answers(const std::string& folder, const AnswerCase& c, const GenerationPlan& plan) {
  LoadOptions load;
  load.compute_dtype = c.dtype;
  load.load_in_4bit = c.load_in_4bit;
  MeasuredMemory memory;
  CausalLM model = load_model(folder, load);
  if (c.rows.has_adapter) {
    LoraConfig lora;
    lora.target_modules = NamesOrPattern("all-linear");
    model.add_adapters(lora, 1);
  }
  std::vector<std::vector<int64_t>> prompts;
  for (const int64_t tokens : c.rows.prompts) {
    std::vector<int64_t> prompt;  // of no common beginning
    for (int64_t i = 0; i < tokens; ++i) prompt.push_back((static_cast<int64_t>(prompts.size()) * 37 + i * 11 + 1) % 4000);
    prompts.push_back(std::move(prompt));
  }
  GenerateOptions options = options_of(c.rows);
  options.cache_bytes = plan.cache.count;
  memory.reset_peak();
  const int64_t before = memory.live();
  static_cast<void>(generate(model, prompts, options));
  return {before, memory.peak()};
}

}  // namespace

TEST_CASE("the plan of a generation is what loading and generating take") {
  at::set_num_threads(1);
  std::vector<AnswerCase> cases{{"equal rows", at::kFloat, rows_of(std::vector<int64_t>(16, 40), 24)},
                                {"mixed rows", at::kFloat, rows_of({200, 3, 17, 90, 1, 60, 33, 8}, 30)},
                                {"one row", at::kFloat, rows_of({300}, 20)},
                                {"few at once", at::kFloat, rows_of(std::vector<int64_t>(9, 50), 10)},
                                {"dense", at::kFloat, rows_of(std::vector<int64_t>(8, 64), 12), false},
                                {"bfloat16", at::kBFloat16, rows_of(std::vector<int64_t>(12, 100), 12)},
                                {"many short rows", at::kFloat, rows_of(std::vector<int64_t>(100, 2), 8)}};
  cases[3].rows.max_rows = 4;
  cases[3].is_exact = false;  // which rows meet depends on their order
  cases[5].is_exact = false;
  const size_t plain = cases.size();
  for (const size_t i : {0, 2, 5}) {
    cases.push_back(cases[i]);
    cases.back().name += ", adapter";
    cases.back().rows.has_adapter = true;
  }
  cases.push_back(cases[6]);
  cases.back().name += ", sampled";
  cases.back().rows.sampling = {.do_sample = true, .temperature = 0.8, .top_p = kPlannedTopP, .repetition_penalty = 1.2, .seed = 3};
  REQUIRE(cases.size() > plain);
  for (const AnswerCase& c : cases) {
    const TemporaryFolder folder;
    write_small_checkpoint(folder, c.dtype == at::kFloat ? "float32" : "bfloat16", c.dtype, false);
    const GenerationPlan plan = plan_generation(settings_for(folder.path(), c), c.rows, kEndless);
    REQUIRE(plan.memory.fits);
    const auto [before, peak] = measure_answers(folder.path(), c, plan);
    const MemoryParts& parts = plan.memory.of(MemoryPhase::kDecode).parts;
    Bytes base;
    for (const MemoryUse use :
         {MemoryUse::kCodes, MemoryUse::kScales, MemoryUse::kDense, MemoryUse::kAdapters, MemoryUse::kGradients})
      base += parts[static_cast<size_t>(use)];
    const Bytes planned = std::max(plan.memory.of(MemoryPhase::kPrefill).allocated, plan.memory.of(MemoryPhase::kDecode).allocated);
    const auto ratio = static_cast<double>(planned.count) / static_cast<double>(peak);
    INFO(c.name << ": planned " << planned.count << ", measured " << peak << "; of the model " << base.count << ", " << before);
    CHECK(parts[static_cast<size_t>(MemoryUse::kCache)] == plan.cache);
    if (c.is_exact && c.dtype == at::kFloat && !c.rows.sampling.do_sample) CHECK(planned.count == peak);
    CHECK(ratio <= 1.05);
    CHECK(ratio >= 0.97);
  }
}

TEST_CASE("a given cache bounds the rows of the plan", "[plan]") {
  const PlanSettings eight = settings_for("llama-3-8b");
  GenerationRows rows = rows_of(std::vector<int64_t>(128, 100), 20);
  const Bytes position = plan_generation(eight, rows, kEndless).position;
  for (const int64_t fit : {1, 2, 24}) {
    rows.cache = position * (120 * fit + 119);
    const GenerationPlan plan = plan_generation(eight, rows, kEndless);
    CHECK(plan.rows == fit);
    CHECK(plan.cache == rows.cache);
  }
  rows.prompts = {100, 10, 10, 300};  // the shortest fit together
  rows.cache = position * 325;
  CHECK(plan_generation(eight, rows, kEndless).rows == 3);
}

TEST_CASE("keys and values are counted for grouped heads, every layer and the dtype, and a window saves none") {
  const PlanSettings eight = settings_for("llama-3-8b");
  GenerationRows rows = rows_of(std::vector<int64_t>(128, 512), 128);
  const GenerationPlan plan = plan_generation(eight, rows, kEndless);
  CHECK(plan.position == Bytes{2 * 32 * 8 * 128 * 2});
  CHECK(plan.rows == 128);
  CHECK(plan.longest == 640);
  CHECK(plan.cache == plan.position * (128 * 640));
  CHECK(plan.memory.of(MemoryPhase::kDecode).parts[static_cast<size_t>(MemoryUse::kCache)] == plan.cache);

  PlanSettings sliding = eight;
  sliding.model.layers.assign(32, {.window = 256, .rope = 0});
  CHECK(plan_generation(sliding, rows, kEndless).cache == plan.cache);
  PlanSettings exact = eight;
  exact.compute_dtype = at::kFloat;
  CHECK(plan_generation(exact, rows, kEndless).position == plan.position * 2);

  // An adapter is there in float32 with gradients, and for decoding once more in the dtype.
  rows.has_adapter = true;
  const auto adapters = [&](const GenerationPlan& with) {
    const MemoryParts& parts = with.memory.of(MemoryPhase::kDecode).parts;
    return parts[static_cast<size_t>(MemoryUse::kAdapters)] + parts[static_cast<size_t>(MemoryUse::kGradients)];
  };
  const GenerationPlan with = plan_generation(eight, rows, kEndless);
  CHECK(adapters(plan) == Bytes{});
  CHECK(adapters(with) == Bytes{with.memory.trainable_parameters * (4 + 4 + 2)});
}

TEST_CASE("as many rows are planned as the room holds, and one more does not fit") {
  PlanSettings half = settings_for("llama-3-8b", "T4");
  half.compute_dtype = at::kHalf;
  const GenerationRows rows = rows_of(std::vector<int64_t>(512, 900), 100);
  const Bytes room{int64_t{14} << 30};
  GenerationRows wide = rows;
  wide.max_rows = 512;
  const GenerationPlan plan = plan_generation(half, wide, room);
  REQUIRE(plan.memory.fits);
  CHECK(plan.rows > 8);
  CHECK(plan.rows < 512);
  CHECK(plan.cache == plan.position * (plan.rows * 1000));
  CHECK(plan.rows == largest_rows(half, rows, room, 512));
  CHECK(plan.memory.peak_reserved() <= room);
  GenerationRows more = wide;
  more.cache = plan.position * ((plan.rows + 1) * 1000);
  CHECK_FALSE(plan_generation(half, more, room).memory.fits);

  const GenerationPlan none = plan_generation(half, rows, Bytes{int64_t{5} << 30});
  CHECK_FALSE(none.memory.fits);
  CHECK(largest_rows(half, rows, Bytes{int64_t{5} << 30}, 512) == 0);
  const std::string said = thrown<ValueError>([&] { require_fit(none, rows); });
  CHECK(has(said, "a row of up to 1000 positions"));
  CHECK(has(said, "keys and values"));
  CHECK(has(said, "lower max_new_tokens (100)"));
  const std::string lower = thrown<ValueError>([&] { require_fit(plan_generation(half, more, room), more); });
  CHECK(has(lower, "Lower or leave out cache_memory."));
}

TEST_CASE("a cache of a given size is the command's, and a row above it is named") {
  const PlanSettings settings = settings_for("llama-3-8b");
  GenerationRows rows = rows_of(std::vector<int64_t>(10, 90), 10);
  const Bytes position = plan_generation(settings, rows, kEndless).position;
  rows.cache = position * 250;
  const GenerationPlan plan = plan_generation(settings, rows, kEndless);
  CHECK(plan.cache == rows.cache);
  rows.cache = position * 99;
  CHECK(has(thrown<ValueError>([&] { (void)plan_generation(settings, rows, kEndless); }), "a row of 100 positions"));
  rows.cache = {};
  rows.prompts.clear();
  CHECK_THROWS_AS(plan_generation(settings, rows, kEndless), ValueError);
  rows.prompts = {5, 0};
  CHECK_THROWS_AS(plan_generation(settings, rows, kEndless), ValueError);
}
