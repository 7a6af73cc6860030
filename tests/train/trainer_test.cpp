// SPDX-License-Identifier: Apache-2.0
// Trainer by itself and as several ranks: where it logs, evaluates and saves, what a resumed run ends in, and whose callbacks decide.
#include "qlorapp/train/trainer.hpp"

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <nlohmann/json.hpp>

#include "catch.hpp"
#include "dist/in_ranks.hpp"
#include "files/folder.hpp"
#include "files/json_file.hpp"
#include "format/expect_error.hpp"
#include "nn/tiny_model.hpp"
#include "qlorapp/json/json.hpp"

using namespace qlorapp;
using files::path_in;

namespace {

std::vector<Example> numbered_rows(int64_t count) {
  std::vector<Example> rows;
  for (int64_t i = 0; i < count; ++i) {
    Example row;
    for (int64_t at = 0; at < 4 + i % 5; ++at) row.input_ids.push_back(static_cast<TokenId>((7 * i + 3 * at) % 67));
    row.labels.assign(row.input_ids.begin(), row.input_ids.end());
    rows.push_back(std::move(row));
  }
  return rows;
}

/// Six steps of two batches each, an epoch and a half.
TrainingArguments trainer_args(const std::string& folder) {
  TrainingArguments args;
  args.output_dir = folder;
  args.per_device_train_batch_size = 2;
  args.gradient_accumulation_steps = 2;
  args.max_steps = 6;
  args.learning_rate = 1e-2;
  args.logging_steps = 2;
  args.save_steps = 3;
  args.use_cpu = true;
  return args;
}

struct TrainerRun {
  TrainOutput output;
  at::Tensor values;
  std::vector<int64_t> evaluated, saved;  ///< Steps.
};

/// @param on_step_end  sets flags.
TrainerRun run_trainer(const TrainingArguments& args, const std::function<void(int64_t step, TrainerControl&)>& on_step_end = {},
                       const std::function<bool(int64_t step)>& stop_at = {},
                       const std::optional<std::string>& resume_from = std::nullopt, Communicator* ranks = nullptr) {
  static std::mutex one_at_a_time;  // the generator of random numbers is the process's
  CausalLM model = [] {
    const std::lock_guard lock(one_at_a_time);
    return tiny::make_model(at::kFloat, 0.1);
  }();
  TrainerRun run;
  int64_t step = 0;
  TrainerCallbacks callbacks;
  callbacks.on_event = [&](TrainerEvent event, const TrainState& state, TrainerControl& control) {
    step = state.global_step;
    if (event == TrainerEvent::kStepEnd && on_step_end) on_step_end(step, control);
  };
  callbacks.on_evaluate = [&](const LogRecord&, TrainerControl&) { run.evaluated.push_back(step); };
  callbacks.on_save = [&](const std::string& folder, TrainerControl&) {
    run.saved.push_back(std::stoll(folder.substr(folder.rfind('-') + 1)));
  };
  if (stop_at) callbacks.stop_now = [&] { return stop_at(step); };
  const std::shared_ptr<Communicator> shared(ranks, [](Communicator*) {});
  Trainer trainer(model, args, numbered_rows(16), numbered_rows(3), "base", callbacks, ranks != nullptr ? shared : nullptr);
  run.output = trainer.train(resume_from);
  run.values = model.arena().values().clone();
  return run;
}

std::vector<std::string> logged_in(const std::string& checkpoint) {
  std::vector<std::string> lines;
  const format::Json state = files::read_json_file(path_in(checkpoint, "trainer_state.json"), {.allow_nonfinite = true});
  for (const auto& entry : state["log_history"]) {
    lines.push_back(std::string(entry.contains("eval_loss") ? "eval" : "loss") + " " + std::to_string(entry["step"].get<int>()));
  }
  return lines;
}

}  // namespace

TEST_CASE("a run logs, evaluates and saves at the steps that its arguments name", "[train][cpu]") {
  const TemporaryFolder folder;
  TrainingArguments args = trainer_args(folder.path());
  args.eval_strategy = "steps";
  args.eval_steps = 4;
  const TrainerRun run = run_trainer(args);
  CHECK(run.output.global_step == 6);
  CHECK_FALSE(run.output.stopped);
  CHECK(run.evaluated == std::vector<int64_t>{4, 6});
  CHECK(run.saved == std::vector<int64_t>{3, 6});
  CHECK(logged_in(folder / "checkpoint-3") == std::vector<std::string>{"loss 2"});
  CHECK(logged_in(folder / "checkpoint-6") == std::vector<std::string>{"loss 2", "loss 4", "eval 4", "loss 6", "eval 6"});
}

TEST_CASE("a resumed run ends in the same bits", "[train][cpu]") {
  const TemporaryFolder whole, parts;
  const at::Tensor wanted = run_trainer(trainer_args(whole.path())).values;
  const auto stop_at_4 = [](int64_t step) { return step == 4; };
  const TrainerRun first = run_trainer(trainer_args(parts.path()), {}, stop_at_4);
  CHECK(first.output.stopped);
  CHECK(first.saved == std::vector<int64_t>{3, 4});
  const TrainerRun second = run_trainer(trainer_args(parts.path()), {}, {}, parts / "checkpoint-4");
  CHECK(second.output.global_step == 6);
  CHECK(at::equal(second.values, wanted));
  CHECK(logged_in(parts / "checkpoint-6") == logged_in(whole / "checkpoint-6"));
}

TEST_CASE("early stopping ends all ranks alike, and a run that is resumed with it ends in the same bits", "[train][cpu]") {
  const auto stopping = [](const TemporaryFolder& folder) {
    TrainingArguments args = trainer_args(folder.path());
    args.gradient_accumulation_steps = 1;
    args.max_steps = 16;
    args.learning_rate = 0;  // no evaluation is better than the first
    args.eval_strategy = args.save_strategy = "steps";
    args.eval_steps = args.save_steps = 2;
    args.load_best_model_at_end = true;
    args.early_stopping_patience = 2;
    return args;
  };
  const TemporaryFolder whole, parts, ranked;
  const TrainerRun run = run_trainer(stopping(whole));
  CHECK(run.output.global_step == 6);
  CHECK(run.evaluated == std::vector<int64_t>{2, 4, 6});
  CHECK_FALSE(run.output.stopped);
  const auto stop_at_5 = [](int64_t step) { return step == 5; };
  CHECK(run_trainer(stopping(parts), {}, stop_at_5).output.stopped);
  const TrainerRun second = run_trainer(stopping(parts), {}, {}, parts / "checkpoint-5");
  CHECK(second.output.global_step == 6);
  CHECK(second.evaluated == std::vector<int64_t>{6});
  CHECK(at::equal(second.values, run.values));
  CHECK(run_trainer(stopping(whole), {}, {}, whole / "checkpoint-6").output.global_step == 6);  // its end was there already
  TrainingArguments patient = stopping(whole);
  patient.early_stopping_patience = 4;
  CHECK(run_trainer(patient, {}, {}, whole / "checkpoint-6").output.global_step == 10);
  std::vector<TrainerRun> runs(2);
  on_ranks(2, [&](Communicator& ranks) {
    runs[static_cast<size_t>(ranks.rank())] = run_trainer(stopping(ranked), {}, {}, std::nullopt, &ranks);
  });
  for (const TrainerRun& each : runs) CHECK(each.output.global_step == 6);
}

TEST_CASE("the flags of the first rank's callbacks are for all ranks, and those of the others for none", "[train][cpu]") {
  const TemporaryFolder folder;
  TrainingArguments args = trainer_args(folder.path());
  args.gradient_accumulation_steps = 1;
  args.save_steps = 100;
  std::vector<TrainerRun> runs(2);
  on_ranks(2, [&](Communicator& ranks) {
    const bool is_first = ranks.rank() == 0;
    const auto flags = [&](int64_t step, TrainerControl& control) {
      if (is_first && step == 2) control.should_save = control.should_evaluate = true;
      if (is_first && step == 4) control.should_training_stop = true;
      if (!is_first) control.should_training_stop = control.should_epoch_stop = control.should_evaluate = true;
    };
    runs[static_cast<size_t>(ranks.rank())] = run_trainer(args, flags, {}, std::nullopt, &ranks);
  });
  for (const TrainerRun& run : runs) {
    CHECK(run.output.global_step == 4);
    CHECK_FALSE(run.output.stopped);
    CHECK(run.evaluated == std::vector<int64_t>{2});
  }
  CHECK(files::is_folder(folder / "checkpoint-2"));
  CHECK(at::equal(runs[0].values, runs[1].values));
}

TEST_CASE("a rank that is asked to stop stops all, behind a checkpoint of the same step", "[train][cpu]") {
  const TemporaryFolder folder;
  TrainingArguments args = trainer_args(folder.path());
  args.gradient_accumulation_steps = 1;
  std::vector<TrainerRun> runs(2);
  on_ranks(2, [&](Communicator& ranks) {
    const bool is_last = ranks.rank() == 1;
    const auto stop = [&](int64_t step) { return is_last && step == 4; };
    runs[static_cast<size_t>(ranks.rank())] = run_trainer(args, {}, stop, std::nullopt, &ranks);
  });
  for (const TrainerRun& run : runs) {
    CHECK(run.output.stopped);
    CHECK(run.output.global_step == 4);
  }
  CHECK(files::is_folder(folder / "checkpoint-4"));
  const at::Tensor wanted = [&] {
    const TemporaryFolder alone;
    TrainingArguments whole = args;
    whole.output_dir = alone.path();
    std::vector<TrainerRun> both(2);
    on_ranks(2, [&](Communicator& ranks) {
      both[static_cast<size_t>(ranks.rank())] = run_trainer(whole, {}, {}, std::nullopt, &ranks);
    });
    return both[0].values;
  }();
  on_ranks(2, [&](Communicator& ranks) {
    runs[static_cast<size_t>(ranks.rank())] = run_trainer(args, {}, {}, folder / "checkpoint-4", &ranks);
  });
  for (const TrainerRun& run : runs) CHECK(at::equal(run.values, wanted));
}
