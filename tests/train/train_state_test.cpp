// SPDX-License-Identifier: Apache-2.0
// What a checkpoint keeps of a run: its numbers, its moments, and what it was made of.
#include "qlorapp/train/train_state.hpp"

#include <cmath>
#include <fstream>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "catch.hpp"
#include "core/check.hpp"
#include "format/expect_error.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/train/trainer.hpp"
#include "train/run_inputs.hpp"
#include "train/unread_losses.hpp"

using namespace qlorapp;

namespace {

/// A state with an arena of its own, under a loss scale.
struct Kept {
  explicit Kept(int64_t size = 40, AdamW::State moments = AdamW::State::kFloat32)
      : arena({{"a", {size}}}, at::kCPU), state(arena, options_of(moments), {.device = at::kCPU, .init_scale = 64}) {
    (void)state.scaler.scale(at::ones({}));
  }
  static AdamW::Options options_of(AdamW::State moments) {
    AdamW::Options options;
    options.state = moments;
    return options;
  }
  AdapterArena arena;
  TrainState state;
};

/// Each number another one, none of them a default.
void fill(TrainState& state) {
  state.seed = 0xfedcba9876543210;
  state.micro_step = 11;
  state.global_step = 12;
  state.cursor = {.epoch = 13, .batch = 14};
  state.tokens_seen = 15;
  state.skipped_steps = 16;
  state.rollbacks = 17;
  state.skips_in_a_row = 28;
  state.last_loss = 29.5;
  state.loss_sum = 18.5;
  state.loss_since_log = 19.5;
  state.steps_since_log = 20;
  state.last_grad_norm = 21.5;
  state.last_learning_rate = 22.5;
  state.owes_log = state.owes_save = true;
  state.optimizer.set_step_count(23);
  for (auto& [name, tensor] : state.optimizer.state_tensors()) tensor.copy_(at::rand(tensor.sizes()));
  state.scaler.load_state_dict(GradScaler::State{.scale = 8, .growth_tracker = 5});
  state.inputs = {.train_data = 24,
                  .eval_data = 25,
                  .base = 26,
                  .base_without_scales = 27,
                  .base_config = {},
                  .device = "cpu",
                  .lora_dropout = 0.5};
}

std::string changed(std::string text, const std::string& from, const std::string& to) {
  REQUIRE(has(text, from));
  return text.replace(text.find(from), from.size(), to);
}

std::string load_refusal(const TemporaryFolder& folder, int64_t size = 40, AdamW::State moments = AdamW::State::kFloat32) {
  return thrown<FormatError>([&] { Kept(size, moments).state.load(folder.path()); });
}

Example row_of(std::vector<TokenId> ids, std::vector<TokenId> labels, std::vector<int64_t> lengths = {}) {
  return {.input_ids = std::move(ids), .labels = std::move(labels), .line = 1, .row_lengths = std::move(lengths)};
}

StepReport report_of(double loss, double norm) {
  StepReport report;
  report.mean_loss = at::tensor(loss, at::kDouble);
  report.grad_norm = at::tensor(norm, at::kDouble);
  return report;
}

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

}  // namespace

TEST_CASE("a state comes back from a checkpoint with each of its numbers, its moments and its loss scale", "[train][cpu]") {
  const TemporaryFolder folder;
  Kept before, after;
  fill(before.state);
  before.state.save(folder.path());
  after.state.load(folder.path());
  const TrainState &a = before.state, &b = after.state;
  REQUIRE(b.seed == a.seed);
  REQUIRE(b.micro_step == 11);
  REQUIRE(b.global_step == 12);
  REQUIRE(b.cursor.epoch == 13);
  REQUIRE(b.cursor.batch == 14);
  REQUIRE(b.tokens_seen == 15);
  REQUIRE(b.skipped_steps == 16);
  REQUIRE(b.rollbacks == 17);
  REQUIRE(b.loss_sum == 18.5);
  REQUIRE(b.loss_since_log == 19.5);
  REQUIRE(b.steps_since_log == 20);
  REQUIRE(b.skips_in_a_row == 28);
  REQUIRE(b.last_loss == 29.5);
  REQUIRE(b.last_grad_norm == 21.5);
  REQUIRE(b.last_learning_rate == 22.5);
  REQUIRE((b.owes_log && b.owes_save));
  REQUIRE_FALSE((b.owes_evaluation || b.owes_epoch_end));
  REQUIRE(b.optimizer.step_count() == 23);
  const auto kept = a.optimizer.state_tensors(), found = b.optimizer.state_tensors();
  for (size_t i = 0; i < kept.size(); ++i) REQUIRE(at::equal(found[i].second, kept[i].second));
  REQUIRE(b.scaler.get_scale() == 8);
  REQUIRE(b.scaler.state_dict()->growth_tracker == 5);
  const RunInputs inputs = RunInputs::load(folder.path());
  REQUIRE(inputs.train_data == 24);
  REQUIRE(inputs.eval_data == 25);
  REQUIRE(inputs.base == 26);
  REQUIRE(inputs.base_without_scales == 27);
  REQUIRE(inputs.device == "cpu");
  REQUIRE(inputs.lora_dropout == 0.5);
}

TEST_CASE("a run state of another version or with a wrong value, and moments of another kind, are refused by name",
          "[train][cpu]") {
  const TemporaryFolder folder;
  Kept before;
  fill(before.state);
  before.state.save(folder.path());
  REQUIRE(has(load_refusal(folder, 300), "'exp_avg' must have shape [512]"));
  REQUIRE(has(load_refusal(folder, 40, AdamW::State::kEightBit), "state1"));
  const std::string text = folder.read("run_state.json");
  const struct {
    const char *from, *to, *reason;
  } rows[] = {{"\"schema\": 6", "\"schema\": 5", "has schema 5; this version reads 6"},
              {"\"schema\": 6", "\"schema\": 7", "has schema 7; this version reads 6"},
              {"\"micro_step\": 11", "\"micro_step\": -1", "'micro_step' must be an integer from 0 to 4294967295; got '-1'"},
              {"\"micro_step\": 11", "\"micro_step\": 1.5", "'micro_step' must be an integer from 0"},
              {"\"micro_step\": 11", "\"micro_step\": 4294967296", "'micro_step' must be an integer from 0"},
              {"\"owes_save\": 1", "\"owes_save\": 2", "'owes_save' must be an integer from 0 to 1; got '2'"},
              {"\"batch\": 14", "\"batches\": 14", "lacks 'batch'"},
              {"\"loss_sum\": 18.5", "\"loss_sum\": \"18.5\"", "'loss_sum' must be a number"},
              {"fedcba9876543210", "fedcba987654321x", "'seed' must be a string of hexadecimal digits"},
              {"fedcba9876543210", "1fedcba9876543210", "'seed' must be a string of hexadecimal digits"},
              {"\"fedcba9876543210\"", "5", "'seed' must be a string"}};
  for (const auto& row : rows) {
    (void)folder.write("run_state.json", changed(text, row.from, row.to));
    INFO(row.to << "\n" << load_refusal(folder));
    REQUIRE(has(load_refusal(folder), row.reason));
  }
}

TEST_CASE("each token, label, length and the order of rows count in the fingerprint of data", "[train][cpu]") {
  const Example first = row_of({1, 2, 3}, {-100, 2, 3}), second = row_of({4, 5}, {4, 5});
  const uint64_t whole = data_fingerprint({first, second});
  REQUIRE(data_fingerprint({first, second}) == whole);
  REQUIRE(data_fingerprint({}) == 0);
  const std::vector<std::vector<Example>> others{{second, first},
                                                 {first},
                                                 {first, second, second},
                                                 {row_of({1, 2, 4}, {-100, 2, 3}), second},
                                                 {row_of({1, 2, 3}, {-100, 2, -100}), second},
                                                 {row_of({2, 1, 3}, {2, -100, 3}), second},
                                                 {row_of({1, 2, 3}, {-100, 2, 3}, {3}), second},
                                                 {row_of({1, 2, 3}, {-100, 2, 3}, {1, 2}), second},
                                                 {row_of({1, 2, 3}, {-100, 2, 3}, {2, 1}), second}};
  for (size_t i = 0; i < others.size(); ++i) {
    INFO(i);
    REQUIRE(data_fingerprint(others[i]) != whole);
    for (size_t j = 0; j < i; ++j) REQUIRE(data_fingerprint(others[i]) != data_fingerprint(others[j]));
  }
}

TEST_CASE("another base, other data and decisive options are refused; the rest is logged", "[train][cpu]") {
  const TemporaryFolder folder;
  Kept before;
  fill(before.state);
  before.state.inputs.lora_dropout = 0;
  before.state.save(folder.path());
  const TrainingArguments saved;
  write_arguments(folder.path(), saved);
  const auto refusal = [&](const std::function<void(TrainingArguments&, RunInputs&)>& change) {
    TrainingArguments args = saved;
    RunInputs inputs = before.state.inputs;
    change(args, inputs);
    return thrown<FormatError>([&] { (void)check_inputs(folder.path(), args, inputs); });
  };
  std::string said;
  set_log_sink([&](LogLevel, std::string_view line) { said += line; });
  REQUIRE(refusal([](TrainingArguments&, RunInputs&) {}) == "nothing");
  REQUIRE(said.empty());
  REQUIRE(has(refusal([](TrainingArguments&, RunInputs& inputs) { inputs.base = 1; }), "another base model"));
  REQUIRE(
      has(refusal([](TrainingArguments&, RunInputs& inputs) { inputs.base_without_scales = inputs.base = 1; }), "another base"));
  // Scales may differ in rounding between kinds of devices.
  REQUIRE(refusal([](TrainingArguments&, RunInputs& inputs) {
            inputs.base = 1;
            inputs.device = "cuda";
          }) == "nothing");
  REQUIRE(has(said, "the scales of the base differ"));
  REQUIRE(has(refusal([](TrainingArguments&, RunInputs& inputs) {
                inputs.base_without_scales = inputs.base = 1;
                inputs.device = "cuda";
              }),
              "another base model"));
  REQUIRE(has(refusal([](TrainingArguments&, RunInputs& inputs) { inputs.train_data = 1; }), "the training data"));
  REQUIRE(has(refusal([](TrainingArguments&, RunInputs& inputs) { inputs.lora_dropout = 0.25; }), "lora_dropout 0 → 0.25"));
  REQUIRE(has(refusal([](TrainingArguments& args, RunInputs&) { args.learning_rate = 1; }), "learning_rate 5e-05 → 1.0"));
  REQUIRE(has(refusal([](TrainingArguments& args, RunInputs&) { args.optim = "adamw_8bit"; }), "optim"));
  REQUIRE(has(refusal([](TrainingArguments& args, RunInputs&) { args.data_seed = 43; }), "data_seed 42 → 43"));
  REQUIRE(has(refusal([](TrainingArguments& args, RunInputs&) { args.gradient_accumulation_steps = 2; }), "8 x 1 x 1 → 8 x 2 x 1"));
  said.clear();
  const auto same_batch = [](TrainingArguments& args, RunInputs&) {
    args.per_device_train_batch_size = 4;
    args.gradient_accumulation_steps = 2;
  };
  REQUIRE(refusal(same_batch) == "nothing");
  REQUIRE(has(said, "8 x 1 x 1 → 4 x 2 x 1"));
  REQUIRE(refusal([](TrainingArguments&, RunInputs& inputs) { inputs.eval_data = 1; }) == "nothing");
  REQUIRE(has(said, "the evaluation data"));
  REQUIRE(refusal([](TrainingArguments& args, RunInputs& inputs) {
            inputs.train_data = 1;
            args.resume_with_changes = true;
          }) == "nothing");
  set_log_sink({});

  before.state.inputs.lora_dropout = 0.5;  // a mask belongs to a micro-batch
  before.state.save(folder.path());
  REQUIRE(has(refusal(same_batch), "8 x 1 x 1 → 4 x 2 x 1"));
}

TEST_CASE("a loss is read once; steps that are not finite stay out of the sums, and 17 in a row end the run", "[train][cpu]") {
  Kept kept;
  TrainState& state = kept.state;
  UnreadLosses losses;
  LossTrend trend;
  losses.add(report_of(2.5, 1), 1);
  losses.add(report_of(1.5, 3), 2);
  losses.read_into(state, /*skips=*/true, trend);
  losses.read_into(state, true, trend);
  REQUIRE(state.loss_sum == 4);
  REQUIRE(state.loss_since_log == 4);
  REQUIRE(state.last_grad_norm == 3);
  REQUIRE(state.last_loss == 1.5);

  set_log_sink([](LogLevel, std::string_view) {});
  for (const double norm : {kNan, static_cast<double>(INFINITY), 0x1p63}) losses.add(report_of(kNan, norm), 3);
  losses.read_into(state, true, trend);
  REQUIRE(state.skipped_steps == 3);
  REQUIRE(state.loss_sum == 4 + 3 * 1.5);  // the last loss in place of each, as transformers has it
  losses.add(report_of(0.5, 1), 6);
  for (int64_t step = 7; step < 7 + 16; ++step) losses.add(report_of(kNan, kNan), step);
  losses.read_into(state, true, trend);
  REQUIRE(state.skipped_steps == 3 + 16);
  losses.add(report_of(kNan, kNan), 23);
  REQUIRE_THROWS_AS(losses.read_into(state, true, trend), TrainingDiverged);
  UnreadLosses strict;
  strict.add(report_of(1, kNan), 1);
  Kept fresh;  // no streak behind it
  REQUIRE_THROWS_AS(strict.read_into(fresh.state, /*skips=*/false, trend), TrainingDiverged);
  set_log_sink({});
}
