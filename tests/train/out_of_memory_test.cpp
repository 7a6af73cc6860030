// SPDX-License-Identifier: Apache-2.0
// Memory runs out at any allocation of a step: the step is taken again in smaller parts, and nothing of the result changes.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "catch.hpp"
#include "nn/tiny_model.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/train/evaluate.hpp"
#include "qlorapp/train/trainer.hpp"

using namespace qlorapp;

namespace {

/// Torch's own allocator, which fails once when a countdown ends, with the words of the real one.
class FailingAllocator final : public c10::Allocator {
 public:
  FailingAllocator() : own_(c10::GetCPUAllocator()) { c10::SetCPUAllocator(this, kPriority); }
  ~FailingAllocator() override { c10::SetCPUAllocator(own_, kPriority); }

  c10::DataPtr allocate(size_t bytes) override {
    const int64_t number = counting ? ++count : 0;  // workers allocate, too
    if (counting && (number == fail_at || (largest > 0 && bytes > largest))) {
      ++failures;
      TORCH_CHECK(
          false, "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate ",
          bytes, " bytes. Error code 12 (Cannot allocate memory)");
    }
    auto* const held = new Held{own_->allocate(bytes), bytes};
    live += static_cast<int64_t>(bytes);
    return {held->memory.get(), held, &release, held->memory.device()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { own_->copy_data(to, from, bytes); }

  std::atomic<bool> counting = false;
  static inline std::atomic<int64_t> live = 0;  ///< Bytes that are held.
  std::atomic<int64_t> count = 0, failures = 0;
  int64_t fail_at = -1;
  size_t largest = 0;  ///< No request may be larger; 0: any may.

 private:
  struct Held {
    c10::DataPtr memory;
    size_t bytes;
  };
  static void release(void* held) {
    const std::unique_ptr<Held> own(static_cast<Held*>(held));
    live -= static_cast<int64_t>(own->bytes);
  }

  static constexpr uint8_t kPriority = 100;
  c10::Allocator* own_;
};

/// Attention's scratch on a CPU grows with the threads: what fits must not depend on the machine.
class TwoThreads {
 public:
  TwoThreads() : before_(at::get_num_threads()) { at::set_num_threads(2); }
  ~TwoThreads() { at::set_num_threads(before_); }
  TwoThreads(const TwoThreads&) = delete;
  TwoThreads& operator=(const TwoThreads&) = delete;

 private:
  int before_;
};

struct Result {
  std::vector<double> losses;
  at::Tensor adapters;
  int64_t substeps = 0, updates = 0, failures = 0, failures_before = 0;  ///< Before the first step.
  std::vector<int64_t> in_updates;  ///< Numbers of the allocations between the events around the optimizer.
  std::vector<int64_t> held;        ///< Bytes at each step's end.
};

std::vector<Example> make_rows(int64_t vocabulary) {
  std::vector<Example> data;
  at::manual_seed(9);
  for (const int64_t length : {9, 4, 16, 7, 12, 5, 11, 8, 6, 14, 3, 10, 13, 9, 5, 8, 16, 4, 7, 12, 6, 10, 11, 15}) {
    const at::Tensor ids = at::randint(vocabulary, {length}, at::kLong);
    Example example;
    for (int64_t i = 0; i < length; ++i) {
      example.input_ids.push_back(static_cast<int32_t>(ids[i].item<int64_t>()));
      example.labels.push_back(static_cast<int32_t>(ids[i].item<int64_t>()));
    }
    data.push_back(std::move(example));
  }
  return data;
}

/// What is said, for as long as it lives; afterwards as by default, on stderr.
class Said {
 public:
  Said() {
    set_log_sink([this](LogLevel level, std::string_view line) {
      if (level == LogLevel::kWarning) lines.emplace_back(line);
      else if (line.starts_with("plan: ")) plans.emplace_back(line);
    });
  }
  ~Said() {
    set_log_sink([](LogLevel level, std::string_view line) {
      if (level == LogLevel::kWarning) std::fprintf(stderr, "%.*s\n", static_cast<int>(line.size()), line.data());
    });
  }
  Said(const Said&) = delete;
  Said& operator=(const Said&) = delete;

  [[nodiscard]] int64_t count(std::string_view text) const {
    return std::count_if(lines.begin(), lines.end(), [&](const std::string& line) { return line.find(text) != std::string::npos; });
  }
  std::vector<std::string> lines, plans;  ///< Warnings, and what plans say.
};

/// Three steps of two micro-batches of four rows, with dropout; memory is counted from a step's begin to the end of its update.
Result train(FailingAllocator& memory, bool worst_case_first = false, bool fp16 = false,
             const std::function<void(TrainerEvent)>& also = {}, bool checkpointing = false) {
  const int64_t at_begin = FailingAllocator::live;
  CausalLM model = tiny::make_model(at::kFloat, /*dropout=*/0.25);
  std::vector<Example> data = make_rows(model.config().vocab_size);
  TrainingArguments args;
  args.per_device_train_batch_size = 4;
  args.worst_case_first = worst_case_first;
  args.gradient_accumulation_steps = 2;
  args.max_steps = 3;
  args.gradient_checkpointing = checkpointing;
  args.fp16 = fp16;  // the model stays in float32: what is of interest is the loss scale
  args.learning_rate = 1e-2;
  args.logging_steps = 1;
  args.save_strategy = "no";
  Result result;
  int64_t before_update = 0;
  TrainerCallbacks callbacks;
  callbacks.on_event = [&](TrainerEvent event, const TrainState&, TrainerControl&) {
    if (also) also(event);
    if (event == TrainerEvent::kSubstepEnd) ++result.substeps;
    if (event == TrainerEvent::kTrainBegin) result.failures_before = memory.failures;
    if (event == TrainerEvent::kStepBegin) memory.counting = true;
    if (event == TrainerEvent::kPreOptimizerStep) {
      ++result.updates;
      before_update = memory.count;
      memory.counting = memory.counting && memory.largest == 0;
    }
    if (event == TrainerEvent::kOptimizerStep) {
      for (int64_t k = before_update + 1; k <= memory.count; ++k) result.in_updates.push_back(k);
      memory.counting = false;
    }
    if (event == TrainerEvent::kStepEnd) result.held.push_back(FailingAllocator::live - at_begin);
  };
  callbacks.on_log = [&](const LogRecord& record, TrainerControl&) {
    if (record.contains("loss")) result.losses.push_back(record.number("loss"));
  };
  Trainer trainer(model, args, std::move(data), {}, "tiny", callbacks);
  memory.failures = 0;
  memory.counting = worst_case_first;
  trainer.train();
  result.failures = memory.failures;
  result.adapters = model.arena().values().clone();
  return result;
}

}  // namespace

TEST_CASE("a failed allocation anywhere in a step changes nothing of the run", "[train][cpu]") {
  const TwoThreads threads;                          // as many allocations in each run
  const bool checkpointing = GENERATE(false, true);  // where allocations fail inside a recompute, too
  FailingAllocator memory;
  const auto run = [&] { return train(memory, false, false, {}, checkpointing); };
  memory.fail_at = 1;
  run();  // what is made once in a process is there from now on
  memory.fail_at = -1;
  memory.count = 0;
  const Result plain = run();
  const int64_t allocations = memory.count;
  REQUIRE(allocations > 200);
  REQUIRE(plain.losses.size() == 3);
  REQUIRE(plain.in_updates.size() >= 3);
  std::vector<int64_t> failing = plain.in_updates;
  const int64_t stride = allocations / 37;  // each kind of allocation is met; all of them would take minutes
  for (int64_t k = 1; k <= allocations; k += stride) failing.push_back(k);
  for (const int64_t k : failing) {
    memory.count = 0;
    memory.fail_at = k;
    const Said said;
    const Result disturbed = run();
    memory.counting = false;
    INFO("allocation " << k << " of " << allocations);
    // The user is told once. Where micro-batches become smaller, so does the plan, which is said behind that of the start.
    CHECK(said.count("[trainer] out of memory") == 1);
    const bool in_update = said.count("out of memory in the update") == 1;
    REQUIRE(said.plans.size() == (in_update ? 1U : 2U));
    CHECK(said.plans.front().ends_with(" for 4 x 16 tokens"));
    if (!in_update) CHECK(said.plans.back().find(" for 1 x ") != std::string::npos);
    REQUIRE(disturbed.losses.size() == plain.losses.size());
    for (size_t i = 0; i < plain.losses.size(); ++i)
      CHECK(std::abs(disturbed.losses[i] - plain.losses[i]) <= 1e-6 * plain.losses[i]);
    CHECK((disturbed.adapters - plain.adapters).norm().item<double>() <= 1e-5 * plain.adapters.norm().item<double>());
    CHECK(disturbed.failures == 1);
    CHECK(disturbed.substeps == plain.substeps);
    CHECK(disturbed.updates == plain.updates);
    // Nothing of the failed attempt is left, whose activations are some 400 KiB. The rotary table grows by the rows that come first.
    for (size_t i = 0; i < plain.held.size(); ++i) CHECK(disturbed.held[i] - plain.held[i] < 1024);
  }
}

TEST_CASE("an update that fails is taken once more under a loss scale, too", "[train][cpu]") {
  const TwoThreads threads;
  FailingAllocator memory;
  const Result plain = train(memory, false, /*fp16=*/true);
  REQUIRE(plain.in_updates.size() >= 3);
  for (int step = 1; step <= 3; ++step) {
    int updates = 0;
    const Said said;
    const Result disturbed = train(memory, false, /*fp16=*/true, [&](TrainerEvent event) {
      if (event == TrainerEvent::kPreOptimizerStep && ++updates == step) memory.fail_at = memory.count + 1;
    });
    memory.counting = false;
    INFO("step " << step);
    CHECK(disturbed.failures == 1);
    CHECK(said.count("out of memory in the update of step") == 1);
    CHECK(disturbed.losses == plain.losses);
    CHECK(at::equal(disturbed.adapters, plain.adapters));
    CHECK(disturbed.updates == plain.updates);
  }
}

TEST_CASE("what fails in a callback is the caller's: nothing is repeated", "[train][cpu]") {
  const TrainerEvent where = GENERATE(TrainerEvent::kSubstepEnd, TrainerEvent::kPreOptimizerStep, TrainerEvent::kOptimizerStep);
  FailingAllocator memory;
  int told = 0;
  CHECK_THROWS_AS(train(memory, false, /*fp16=*/true,
                        [&](TrainerEvent event) {
                          if (event != where) return;
                          ++told;
                          TORCH_CHECK_WITH(OutOfMemoryError, false, "of the callback");
                        }),
                  c10::OutOfMemoryError);
  CHECK(told == 1);
}

TEST_CASE("where whole micro-batches never fit, their parts do, and a row that does not says what would help", "[train][cpu]") {
  const TwoThreads threads;
  FailingAllocator memory;
  const Result plain = train(memory);
  memory.largest = 24 * 88 * 2 * 4;  // gate and up of 24 tokens
  const Said said;
  const Result parts = train(memory);
  CHECK(said.count("out of memory in step") == 1);  // not again for each micro-batch
  for (size_t i = 0; i < plain.losses.size(); ++i) CHECK(std::abs(parts.losses[i] - plain.losses[i]) <= 1e-6 * plain.losses[i]);
  memory.largest = 12 * 88 * 2 * 4;  // there are rows of 16
  try {
    train(memory);
    FAIL("a row of 16 tokens cannot fit");
  } catch (const OutOfMemoryError& error) {
    memory.counting = false;
    const std::string text = error.what();
    INFO(text);
    CHECK(text.find("with one row of 16 tokens") != std::string::npos);
    const size_t need = text.find("One row of 16 tokens needs "), shorter = text.find("Ways out: rows of 8 tokens"),
                 lower = text.find("rank 2"), budget = text.find("memory_budget=auto");
    CHECK(budget != std::string::npos);
    CHECK((need < shorter && shorter < lower && lower < budget));
  }
  memory.counting = false;
}

TEST_CASE("the worst case comes first: memory runs out before the first step or not at all", "[train][cpu]") {
  const TwoThreads threads;
  FailingAllocator memory;
  const Result plain = train(memory);
  const Result first = train(memory, /*worst_case_first=*/true);
  memory.counting = false;
  CHECK(first.losses == plain.losses);
  CHECK(at::equal(first.adapters, plain.adapters));
  memory.largest = 24 * 88 * 2 * 4;
  const Result parts = train(memory, /*worst_case_first=*/true);
  memory.counting = false;
  CHECK(parts.failures_before > 0);
  CHECK(parts.failures == parts.failures_before);
  for (size_t i = 0; i < plain.losses.size(); ++i) CHECK(std::abs(parts.losses[i] - plain.losses[i]) <= 1e-6 * plain.losses[i]);
}

TEST_CASE("an evaluation that does not fit is taken in parts, with the same result", "[train][cpu]") {
  const TwoThreads threads;
  FailingAllocator memory;
  CausalLM model = tiny::make_model(at::kFloat);
  const std::vector<Example> rows = make_rows(model.config().vocab_size);
  const auto score = [&] {
    memory.count = memory.failures = 0;
    memory.counting = true;
    const EvalResult result = evaluate(model, rows, {.batch_size = 8, .exact_match = true, .after_each_batch = {}});
    memory.counting = false;
    return result;
  };
  score();  // what is made once is not there yet
  const EvalResult plain = score();
  const int64_t allocations = memory.count;
  const auto is_plain = [&](const EvalResult& result) {
    CHECK(std::abs(result.mean_of_batches - plain.mean_of_batches) <= 1e-6 * plain.mean_of_batches);
    CHECK(std::abs(result.token_weighted - plain.token_weighted) <= 1e-6 * plain.token_weighted);
    CHECK(result.target_tokens == plain.target_tokens);
    CHECK(result.exact_matches == plain.exact_matches);
  };
  REQUIRE(allocations > 50);
  const Said said;
  const int64_t held = FailingAllocator::live;
  for (int64_t k = 1; k <= allocations; k += allocations / 29) {
    INFO("allocation " << k << " of " << allocations);
    memory.fail_at = k;
    is_plain(score());
    CHECK(memory.failures.load() == 1);
    CHECK(FailingAllocator::live == held);
  }
  memory.fail_at = -1;
  memory.largest = 40 * 88 * 2 * 4;  // gate and up of 40 tokens; eight rows have up to 80
  const int64_t before = said.count("out of memory with");
  is_plain(score());
  CHECK(memory.failures.load() > 0);
  CHECK(said.count("out of memory with") - before == memory.failures.load());
  CHECK(memory.failures.load() <= 2);  // not in each batch
  memory.largest = 8 * 88 * 2 * 4;
  CHECK_THROWS(score());
  memory.counting = false;
}
