// SPDX-License-Identifier: Apache-2.0
// Memory runs out at any allocation of a step: the step is taken again in smaller parts, and nothing of the result changes.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>

#include <string>
#include <vector>

#include "catch.hpp"
#include "nn/tiny_model.hpp"
#include "qlorapp/train/trainer.hpp"

using namespace qlorapp;

namespace {

/// Torch's own allocator, which fails once when a countdown ends, with the words of the real one.
class FailingAllocator final : public c10::Allocator {
 public:
  FailingAllocator() : own_(c10::GetCPUAllocator()) { c10::SetCPUAllocator(this, kPriority); }
  ~FailingAllocator() override { c10::SetCPUAllocator(own_, kPriority); }

  c10::DataPtr allocate(size_t bytes) override {
    if (counting) ++count;
    if (counting && (count == fail_at || (largest > 0 && bytes > largest))) {
      ++failures;
      TORCH_CHECK(
          false, "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate ",
          bytes, " bytes. Error code 12 (Cannot allocate memory)");
    }
    return own_->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return own_->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override { own_->copy_data(to, from, bytes); }

  bool counting = false;
  int64_t count = 0, failures = 0, fail_at = -1;
  size_t largest = 0;  ///< No request may be larger; 0: any may.

 private:
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
  int64_t substeps = 0, failures = 0, failures_before = 0;  ///< Before the first step.
};

/// Three steps of two micro-batches of four rows, with dropout; memory is counted from a step's begin to its update.
Result train(FailingAllocator& memory, bool worst_case_first = false) {
  CausalLM model = tiny::make_model(at::kFloat, /*dropout=*/0.25);
  std::vector<Example> data;
  at::manual_seed(9);
  for (const int64_t length : {9, 4, 16, 7, 12, 5, 11, 8, 6, 14, 3, 10, 13, 9, 5, 8, 16, 4, 7, 12, 6, 10, 11, 15}) {
    const at::Tensor ids = at::randint(model.config().vocab_size, {length}, at::kLong);
    Example example;
    for (int64_t i = 0; i < length; ++i) {
      example.input_ids.push_back(static_cast<int32_t>(ids[i].item<int64_t>()));
      example.labels.push_back(static_cast<int32_t>(ids[i].item<int64_t>()));
    }
    data.push_back(std::move(example));
  }
  TrainingArguments args;
  args.per_device_train_batch_size = 4;
  args.worst_case_first = worst_case_first;
  args.gradient_accumulation_steps = 2;
  args.max_steps = 3;
  args.learning_rate = 1e-2;
  args.logging_steps = 1;
  args.save_strategy = "no";
  Result result;
  TrainerCallbacks callbacks;
  callbacks.on_event = [&](TrainerEvent event, const TrainState&, TrainerControl&) {
    if (event == TrainerEvent::kSubstepEnd) ++result.substeps;
    if (event == TrainerEvent::kTrainBegin) result.failures_before = memory.failures;
    if (event == TrainerEvent::kStepBegin) memory.counting = true;
    if (event == TrainerEvent::kPreOptimizerStep) memory.counting = false;
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
  FailingAllocator memory;
  const Result plain = train(memory);
  const int64_t allocations = memory.count;
  REQUIRE(allocations > 200);
  REQUIRE(plain.losses.size() == 3);
  const int64_t stride = allocations / 37;  // each kind of allocation is met; all of them would take minutes
  for (int64_t k = 1; k <= allocations; k += stride) {
    memory.count = 0;
    memory.fail_at = k;
    const Result disturbed = train(memory);
    memory.counting = false;
    INFO("allocation " << k << " of " << allocations);
    REQUIRE(disturbed.losses.size() == plain.losses.size());
    for (size_t i = 0; i < plain.losses.size(); ++i)
      CHECK(std::abs(disturbed.losses[i] - plain.losses[i]) <= 1e-6 * plain.losses[i]);
    CHECK((disturbed.adapters - plain.adapters).norm().item<double>() <= 1e-5 * plain.adapters.norm().item<double>());
    CHECK(disturbed.substeps == plain.substeps);
  }
}

TEST_CASE("where whole micro-batches never fit, their parts do, and a row that does not says what would help", "[train][cpu]") {
  const TwoThreads threads;
  FailingAllocator memory;
  const Result plain = train(memory);
  memory.largest = 24 * 88 * 2 * 4;  // gate and up of 24 tokens
  const Result parts = train(memory);
  for (size_t i = 0; i < plain.losses.size(); ++i) CHECK(std::abs(parts.losses[i] - plain.losses[i]) <= 1e-6 * plain.losses[i]);
  memory.largest = 12 * 88 * 2 * 4;  // there are rows of 16
  try {
    train(memory);
    FAIL("a row of 16 tokens cannot fit");
  } catch (const c10::OutOfMemoryError& error) {
    memory.counting = false;
    const std::string text = error.what();
    INFO(text);
    CHECK(text.find("with one row of 16 tokens") != std::string::npos);
    CHECK(text.find("Ways out: rows of 8 tokens") != std::string::npos);
    CHECK(text.find("rank 2") != std::string::npos);
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
