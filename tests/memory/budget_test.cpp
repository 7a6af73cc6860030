// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/memory/budget.hpp"

#include <string>
#include <vector>

#include "catch.hpp"
#include "core/check.hpp"
#include "format/expect_error.hpp"
#include "memory/plan_settings.hpp"
#include "qlorapp/memory/roofline.hpp"

using namespace qlorapp;

namespace {

PlanSettings run_of(const char* model, const char* gpu) {
  PlanSettings settings = settings_for(model, gpu);
  settings.batch = 2;
  settings.accumulation = 2;
  return settings;
}

double seconds(const PlanSettings& settings, const Gpu& gpu) {
  const StepTime time = step_time(settings, gpu, static_cast<double>(settings.length));
  return time.micro_batch() * static_cast<double>(settings.accumulation) + time.optimizer;
}

Bytes gib(double amount) { return {static_cast<int64_t>(amount * 0x1p30)}; }

}  // namespace

TEST_CASE("what a budget chooses fits it, keeps the effective batch, and is as fast as the best of a grid made by hand") {
  const char* const model = GENERATE("llama-3.2-1b", "llama-3.1-8b");
  const char* const card = GENERATE("T4", "H200");
  const Gpu gpu = find_gpu(card);
  const PlanSettings settings = run_of(model, card);
  const bool small = std::string(model) == "llama-3.2-1b";
  for (const double size : small ? std::vector{1.6, 2.0, 4.0} : std::vector{6.0, 8.0, 12.0}) {
    const BudgetChoice choice = fit_budget(settings, gpu, {gib(size), 4});
    INFO(model << " on " << card << ", " << size << " GiB: " << choice.text);
    CHECK(choice.settings.batch * choice.settings.accumulation == 4);
    CHECK(plan_memory(choice.settings, gib(size)).fits);
    double best = 1e9;
    for (const int64_t batch : {1, 2, 4}) {
      for (const Keep keep : {Keep::kEverything, Keep::kAttentionOnly, Keep::kInputOnly, Keep::kInputOnHost}) {
        for (const MemorySettings& memory :
             {MemorySettings{}, MemorySettings{.embedding_on_host = true}, MemorySettings{512, 0, WeightWorkspace::kStack, true},
              MemorySettings{512, 1024, WeightWorkspace::kStack, true}}) {
          PlanSettings own = settings;
          own.batch = batch;
          own.accumulation = 4 / batch;
          own.memory = memory;
          own.segments = keep_in_each_block(own.model.num_hidden_layers, keep);
          if (plan_memory(own, gib(size)).fits) best = std::min(best, seconds(own, gpu));
        }
      }
    }
    CHECK(choice.seconds <= 1.03 * best);
  }
}

TEST_CASE("a budget that holds everything changes nothing but the micro-batch") {
  const Gpu gpu = find_gpu("H200");
  const BudgetChoice choice = fit_budget(run_of("llama-3.2-1b", "H200"), gpu, {gib(100), 4});
  CHECK(choice.keep == "everything");
  CHECK(choice.settings.memory == MemorySettings{});
  CHECK_THAT(choice.text, Catch::Matchers::ContainsSubstring("nothing is computed twice"));
}

TEST_CASE("more budget is never slower, and the text says what comes next") {
  const Gpu gpu = find_gpu("H200");
  const PlanSettings settings = run_of("llama-3.2-1b", "H200");
  double before = 1e9;
  for (const double size : {1.5, 1.8, 2.2, 3.0, 5.0, 9.0}) {
    const BudgetChoice choice = fit_budget(settings, gpu, {gib(size), 4});
    INFO(choice.text);
    CHECK(choice.seconds <= before * 1.005);
    before = choice.seconds;
    if (choice.keep.find(',') != std::string::npos) CHECK_THAT(choice.text, Catch::Matchers::ContainsSubstring("next faster"));
  }
}

TEST_CASE("a budget that nothing fits says how much is missing and what would help: batch, base, length and rank in this order") {
  const PlanSettings settings = run_of("llama-3.1-8b", "H200");
  const Gpu gpu = find_gpu("H200");
  try {
    static_cast<void>(fit_budget(settings, gpu, {gib(4), 0}));
    FAIL("4 GiB hold no 8B");
  } catch (const ValueError& error) {
    const std::string text = error.what();
    INFO(text);
    const size_t batch = text.find("batch 1: "), length = text.find("rows of 1024 tokens: "), rank = text.find("rank 8: ");
    CHECK(text.find("more. Ways out: ") < batch);
    const size_t base = text.find("base_on_host: "), fits = text.find(", fits", base);
    CHECK(batch < base);
    CHECK(base < fits);
    CHECK(fits < length);
    CHECK(length < rank);
    CHECK(rank != std::string::npos);
  }
  CHECK_THROWS_AS(fit_budget(settings, gpu, {Bytes{0}, 0}), ValueError);
}

TEST_CASE("on a CPU nothing waits on the host, which is where everything is") {
  PlanSettings settings = run_of("llama-3.2-1b", "H200");
  settings.device = {at::kCPU, 0, 2};
  settings.compute_dtype = at::kFloat;
  settings.length = 256;
  const BudgetChoice choice = fit_budget(settings, rates_of("", 0, {}), {gib(2.8), 4});
  INFO(choice.text);
  CHECK(choice.keep.find("host") == std::string::npos);
  CHECK_FALSE(choice.settings.memory.embedding_on_host);
  CHECK(plan_memory(choice.settings, gib(2.8)).fits);
}

TEST_CASE("a card is known by its driver's name") {
  CHECK(rates_of("NVIDIA H200", 90, {}).name == "H200");
  CHECK(rates_of("Tesla T4", 75, {}).name == "T4");
  CHECK(rates_of("NVIDIA A100-SXM4-80GB", 80, {}).name == "A100-80GB");
  CHECK(rates_of("NVIDIA A10G", 86, {}).name == "A10G");
  CHECK(rates_of("NVIDIA GeForce RTX 4090", 89, {}).name == "RTX 4090");
  const Gpu other = rates_of("NVIDIA L40", 89, gib(48));  // not the L4
  CHECK(other.name.empty());
  CHECK(other.architecture == 89);
  CHECK(other.memory == gib(48));
}
