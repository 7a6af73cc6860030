// SPDX-License-Identifier: Apache-2.0
// The plan of a merge beside what torch's allocator hands out while an adapter is really merged on a CPU.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <string>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "core/check.hpp"
#include "format/expect_error.hpp"
#include "qlorapp/io/adapter.hpp"
#include "qlorapp/io/load_model.hpp"
#include "qlorapp/io/merge.hpp"
#include "qlorapp/memory/measured_memory.hpp"
#include "qlorapp/memory/plan_report.hpp"
#include "qlorapp/memory/planner.hpp"
#include "small_checkpoint.hpp"

using namespace qlorapp;

namespace {

PlanSettings merge_settings(const std::string& folder, const LoraConfig& lora) {
  PlanSettings settings;
  settings.model = format::load_model_config(folder);
  settings.lora = lora;
  settings.length = 8;
  settings.device.threads = at::get_num_threads();
  return settings;
}

/// @returns (measured, planned).
std::pair<Bytes, PhasePlan> merged(const std::string& folder, const LoraConfig& lora, const MergeOptions& options = {}) {
  const TemporaryFolder there;
  {
    CausalLM model = load_model(folder, {});
    model.add_adapters(lora, 1);
    save_adapter(model, there / "adapter", "base");
  }
  Bytes measured;
  {
    const MeasuredMemory memory;
    merge_adapter(folder, there / "adapter", there / "merged", options);
    measured = {memory.peak()};
    CHECK(memory.live() == 0);
  }
  return {measured, plan_memory(merge_settings(folder, lora)).of(ops::MemoryPhase::kMerge)};
}

void check_close(const std::pair<Bytes, PhasePlan>& found) {
  const auto measured = static_cast<double>(found.first.count), planned = static_cast<double>(found.second.allocated.count);
  INFO("measured " << measured << ", planned " << planned);
  CHECK(planned <= 1.05 * measured);
  CHECK(planned >= 0.97 * measured);
  CHECK(sum(found.second.parts) == found.second.tensors);
}

LoraConfig merged_lora(const char* targets) {
  LoraConfig lora;
  lora.r = 16;
  lora.target_modules = NamesOrPattern(targets);
  return lora;
}

}  // namespace

TEST_CASE("the plan of a merge is what a merge takes: the largest weight that has an adapter, stored and in float32") {
  const auto [name, dtype] = GENERATE(std::pair{"float32", at::kFloat}, std::pair{"bfloat16", at::kBFloat16});
  const bool tied = GENERATE(false, true);
  INFO(name << (tied ? ", tied" : ""));
  const TemporaryFolder folder;
  write_small_checkpoint(folder, name, dtype, tied);
  check_close(merged(folder.path(), merged_lora("all-linear")));
  check_close(merged(folder.path(), merged_lora(".*k_proj")));
  LoraConfig dora = merged_lora("all-linear");
  dora.use_dora = true;
  dora.r = 64;
  dora.rank_pattern = {{"up_proj", 128}};
  check_close(merged(folder.path(), dora));
  for (const bool double_quant : {true, false}) {
    const TemporaryFolder quantized;
    Quantizer::Options four_bit;
    four_bit.double_quant = double_quant;
    quantize_checkpoint(folder.path(), quantized / "model", four_bit, at::kFloat);
    INFO("quantized before" << (double_quant ? ", twice" : ""));
    check_close(merged(quantized / "model", merged_lora("all-linear")));
  }
}

TEST_CASE("a merge holds one weight whatever the model's size, and its bytes are in no peak of the run") {
  const TemporaryFolder folder;
  write_small_checkpoint(folder, "bfloat16", at::kBFloat16, false);
  const LoraConfig lora = merged_lora("all-linear");
  PlanSettings settings = merge_settings(folder.path(), lora);
  const MemoryPlan plan = plan_memory(settings);
  const PhasePlan& merge = plan.of(ops::MemoryPhase::kMerge);
  // One of the MLP's weights in 16 bits and in float32, with its matrices.
  CHECK(merge.allocated == Bytes{1536 * 512 * (2 + 4) + 16 * (1536 + 512) * 4});
  settings.model.num_hidden_layers = 40;
  settings.model.vocab_size = 40'000;
  CHECK(plan_memory(settings).of(ops::MemoryPhase::kMerge).allocated == merge.allocated);

  settings.model.intermediate_size = 400'000;  // a merge that would be the fullest of all
  settings.model.num_hidden_layers = 1;
  settings.lora = merged_lora(".*q_proj");
  const MemoryPlan without = plan_memory(settings);
  settings.lora = merged_lora(".*(q|up)_proj");
  settings.load_in_4bit = true;
  const MemoryPlan with = plan_memory(settings);
  CHECK(with.of(ops::MemoryPhase::kMerge).allocated > with.peak_allocated());
  CHECK(with.fullest() != ops::MemoryPhase::kMerge);
  CHECK(with.fullest_of_training() != ops::MemoryPhase::kMerge);
  CHECK(with.peak_reserved() < with.of(ops::MemoryPhase::kMerge).reserved);
  CHECK(without.of(ops::MemoryPhase::kMerge).allocated < with.of(ops::MemoryPhase::kMerge).allocated);
  CHECK(plan_memory(settings, with.peak_reserved()).fits);
  for (const TimelinePoint& point : with.timeline) CHECK(point.phase != ops::MemoryPhase::kMerge);
}

TEST_CASE("tables say that a merge is of host memory and after the run") {
  const TemporaryFolder folder;
  write_small_checkpoint(folder, "bfloat16", at::kBFloat16, false);
  const PlanSettings settings = merge_settings(folder.path(), merged_lora("all-linear"));
  const MemoryPlan plan = plan_memory(settings);
  const std::string amount = to_string(plan.of(ops::MemoryPhase::kMerge).allocated);
  for (const std::string& table : {phase_table(plan), checklist(plan, settings)}) {
    const size_t row = table.find("\n  merge");
    REQUIRE(row != std::string::npos);
    const std::string line = table.substr(row, table.find('\n', row + 1) - row);
    CHECK(line.find("host memory") != std::string::npos);
    CHECK(line.find(amount) != std::string::npos);
  }
}
