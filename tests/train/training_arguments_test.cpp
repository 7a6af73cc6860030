// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/train/training_arguments.hpp"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "catch.hpp"
#include "core/check.hpp"
#include "format/config_json.hpp"
#include "qlorapp/core/log.hpp"

using namespace qlorapp;

namespace {

TrainingArguments read(const std::string& text) {
  TrainingArguments args;
  format::from_json(format::parse_json(text, "args.json"), args, "args.json");
  return args;
}

std::string error_of(const std::string& text) {
  try {
    read(text).validate();
  } catch (const Error& error) { return error.what(); }
  return "no error";
}

}  // namespace

TEST_CASE("the defaults are valid and say nothing", "[train][cpu]") {
  std::vector<std::string> lines;
  set_log_sink([&](LogLevel, std::string_view line) { lines.emplace_back(line); });
  REQUIRE_NOTHROW(TrainingArguments{}.validate());
  set_log_sink({});
  REQUIRE(lines.empty());
  REQUIRE(TrainingArguments{}.precision() == Precision::kFp32);
}

TEST_CASE("each option outside its range is named with its rule and value", "[train][cpu]") {
  const auto [text, message] = GENERATE(table<std::string, std::string>({
      {R"({"output_dir":""})", "output_dir must not be empty"},
      {R"({"per_device_train_batch_size":0})", "per_device_train_batch_size must be an integer >= 1; got 0."},
      {R"({"per_device_eval_batch_size":-1})", "per_device_eval_batch_size must be an integer >= 1; got -1."},
      {R"({"gradient_accumulation_steps":0})", "gradient_accumulation_steps must be an integer >= 1; got 0."},
      {R"({"num_train_epochs":0})", "num_train_epochs must be finite and > 0; got 0."},
      {R"({"max_steps":0})", "max_steps must be > 0, or -1"},
      {R"({"learning_rate":-1})", "learning_rate must be finite and >= 0; got -1."},
      {R"({"lr_scheduler_type":"cosin"})", "warmup_stable_decay]; got 'cosin'. Did you mean 'cosine'?"},
      {R"({"warmup_steps":-1})", "warmup_steps must be finite and >= 0"},
      {R"({"warmup_ratio":1.5})", "warmup_ratio must be in [0, 1]; got 1.5."},
      {R"({"optim":"lion_8bit"})",
       "optim must be one of [adamw_torch, adamw_torch_fused, adamw_8bit, adamw_bnb_8bit, paged_adamw_8bit, "
       "paged_adamw_32bit]"},
      {R"({"weight_decay":-0.1})", "weight_decay must be finite and >= 0"},
      {R"({"adam_beta1":1})", "adam_beta1 must be in [0, 1); got 1."},
      {R"({"adam_beta2":-0.5})", "adam_beta2 must be in [0, 1)"},
      {R"({"adam_epsilon":-1})", "adam_epsilon must be finite and >= 0"},
      {R"({"adam_epsilon":0,"optim":"adamw_8bit"})", "adam_epsilon must be > 0 with optim=adamw_8bit"},
      {R"({"max_grad_norm":-1})", "max_grad_norm must be finite and >= 0"},
      {R"({"fp16":true,"bf16":true})", "At most one of fp16 and bf16 can be True, but not both"},
      {R"({"checkpoint_keep":"input"})", "input_only"},
      {R"({"checkpoint_keep":"input_only:x,everything:2"})", "'input_only:x': behind ':' comes a number of blocks"},
      {R"({"checkpoint_keep":["input_only","everything","everything:2"]})", "only one entry may omit its number of blocks"},
      {R"({"loss_chunk_rows":-1})", "loss_chunk_rows must be a number of rows, or 0"},
      {R"({"mlp_tile_rows":6})", "mlp_tile_rows must be a multiple of 4"},
      {R"({"weight_workspace":"stacks"})",
       "[weight_workspace] must be one of [layer, stack, projection]; got 'stacks'. Did you mean 'stack'?"},
      {R"({"max_length":1})", "max_length must be an integer >= 2"},
      {R"({"train_sampling_strategy":"shuffle"})", "train_sampling_strategy must be one of [random, sequential, group_by_length]"},
      {R"({"logging_strategy":"often"})", "logging_strategy must be one of [no, steps, epoch]"},
      {R"({"logging_steps":0})", "logging_steps must be finite and > 0; got 0."},
      {R"({"logging_steps":2.5})", "logging_steps must be an integer if bigger than 1; got 2.5."},
      {R"({"eval_strategy":"best"})", "eval_strategy must be one of [no, steps, epoch]"},
      {R"({"eval_strategy":"steps","eval_steps":1.5})", "eval_steps must be an integer if bigger than 1; got 1.5."},
      {R"({"save_strategy":"bests"})", "save_strategy must be one of [no, steps, epoch, best]"},
      {R"({"save_strategy":"best"})", "save_strategy=best needs evaluations"},
      {R"({"save_strategy":"best","eval_strategy":"epoch"})", "save_strategy=best needs metric_for_best_model"},
      {R"({"load_best_model_at_end":true,"eval_strategy":"epoch"})",
       "to be the same, steps or epoch, or save_strategy=best; got epoch and steps."},
      {R"({"load_best_model_at_end":true,"eval_strategy":"steps","eval_steps":3,"save_steps":4})",
       "a multiple of eval_steps; got 4 and 3."},
      {R"({"lr_scheduler_type":"cosine","lr_scheduler_kwargs":{"num_cycle":1}})",
       "no setting 'num_cycle'; cosine has [num_cycles]. Did you mean 'num_cycles'?"},
      {R"({"lr_scheduler_type":"cosine","lr_scheduler_kwargs":{"num_cycles":"x"}})", "num_cycles must be a number"},
      {R"({"lr_scheduler_type":"cosine_with_min_lr"})", "give one of min_lr and min_lr_rate."},
      {R"({"lr_scheduler_type":"warmup_stable_decay"})", "num_decay_steps is required."},
      {R"({"lr_scheduler_type":"polynomial","learning_rate":1e-8})", "learning_rate must be above the lr_end"},
      {R"({"lr_scheduler_kwargs":[1]})", "must be an object of settings"},
      {R"({"torch_empty_cache_steps":0})", "torch_empty_cache_steps must be an integer >= 1"},
      {R"({"eval_delay":-1})", "eval_delay must be finite and >= 0"},
      {R"({"include_num_input_tokens_seen":"some"})", "include_num_input_tokens_seen must be one of [no, all, non_padding]"},
      {R"({"save_steps":-1})", "save_steps must be finite and > 0"},
      {R"({"save_total_limit":-1})", "save_total_limit must be an integer >= 0; got -1."},
      {R"({"seed":-1})", "seed must be an integer >= 0"},
      {R"({"data_seed":-1})", "data_seed must be an integer >= 0"},
      {R"({"learnign_rate":1})", "unknown option 'learnign_rate'. Did you mean 'learning_rate'?"},
      {R"({"learning_rate":"1e-4"})", "'learning_rate' must be a number"},
  }));
  REQUIRE_THAT(error_of(text), Catch::Matchers::ContainsSubstring(message));
}

TEST_CASE("numbers that are not finite are refused", "[train][cpu]") {
  TrainingArguments args;
  args.learning_rate = std::numeric_limits<double>::quiet_NaN();
  REQUIRE_THROWS_AS(args.validate(), ValueError);
  args = {};
  args.num_train_epochs = std::numeric_limits<double>::infinity();
  REQUIRE_THROWS_AS(args.validate(), ValueError);
  args = {};
  args.adam_beta2 = std::numeric_limits<double>::quiet_NaN();
  REQUIRE_THROWS_AS(args.validate(), ValueError);
}

TEST_CASE("older spellings mean the same and are said, and not beside the newer one", "[train][cpu]") {
  std::vector<std::string> lines;
  set_log_sink([&](LogLevel, std::string_view line) { lines.emplace_back(line); });
  const TrainingArguments args = read(
      R"({"evaluation_strategy":"epoch","no_cuda":true,"max_seq_length":512,"per_gpu_train_batch_size":2,"per_gpu_eval_batch_size":3,)"
      R"("activation_checkpointing":true})");
  REQUIRE(args.eval_strategy == "epoch");
  REQUIRE(args.use_cpu);
  REQUIRE(args.max_length == 512);
  REQUIRE(args.per_device_train_batch_size == 2);
  REQUIRE(args.per_device_eval_batch_size == 3);
  REQUIRE(args.gradient_checkpointing);
  set_log_sink({});
  REQUIRE(lines.size() == 5);  // activation_checkpointing is the newer name
  REQUIRE_THROWS_AS(read(R"({"evaluation_strategy":"epoch","eval_strategy":"steps"})"), ValueError);
}

TEST_CASE("every optimizer name means float32 or eight-bit moments, paged ones the same numbers", "[train][cpu]") {
  set_log_sink({});
  for (const char* name : {"adamw_torch", "adamw_torch_fused", "paged_adamw_32bit"}) {
    TrainingArguments args;
    args.optim = name;
    REQUIRE_NOTHROW(args.validate());
    REQUIRE_FALSE(args.optimizer_is_8bit());
  }
  for (const char* name : {"adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"}) {
    TrainingArguments args;
    args.optim = name;
    REQUIRE_NOTHROW(args.validate());
    REQUIRE(args.optimizer_is_8bit());
  }
}

TEST_CASE("a warm-up that its schedule does not have is said once", "[train][cpu]") {
  std::vector<std::string> lines;
  set_log_sink([&](LogLevel, std::string_view line) { lines.emplace_back(line); });
  const auto args = read(R"({"lr_scheduler_type":"constant","warmup_steps":3})");
  args.validate();
  args.validate();
  set_log_sink({});
  REQUIRE(lines.size() == 1);
  REQUIRE_THAT(lines[0], Catch::Matchers::ContainsSubstring("constant_with_warmup"));
}

TEST_CASE("eval_steps falls back to logging_steps, as in transformers", "[train][cpu]") {
  REQUIRE(read(R"({"logging_steps":7})").eval_interval() == 7);
  REQUIRE(read(R"({"logging_steps":7,"eval_steps":0})").eval_interval() == 7);
  REQUIRE(read(R"({"logging_steps":7,"eval_steps":0.25})").eval_interval() == 0.25);
}

TEST_CASE("the best evaluation is that of the metric which is named, in its direction", "[train][cpu]") {
  REQUIRE(TrainingArguments{}.best_metric_name().empty());
  REQUIRE(read(R"({"save_strategy":"best","eval_strategy":"epoch","load_best_model_at_end":true})").best_metric_name() ==
          "eval_loss");
  REQUIRE_FALSE(read(R"({"load_best_model_at_end":true})").best_is_greatest());
  REQUIRE(read(R"({"metric_for_best_model":"accuracy"})").best_metric_name() == "eval_accuracy");
  REQUIRE(read(R"({"metric_for_best_model":"eval_accuracy"})").best_is_greatest());
  REQUIRE_FALSE(read(R"({"metric_for_best_model":"eval_accuracy","greater_is_better":false})").best_is_greatest());
}

TEST_CASE("group_by_length and counted tokens are understood in both forms", "[train][cpu]") {
  REQUIRE(read(R"({"group_by_length":true})").sampling() == "group_by_length");
  REQUIRE(read(R"({"train_sampling_strategy":"sequential"})").sampling() == "sequential");
  REQUIRE(read(R"({"include_num_input_tokens_seen":true})").counts_input_tokens());
  REQUIRE(read(R"({"include_num_input_tokens_seen":"non_padding"})").counts_input_tokens());
  REQUIRE_FALSE(read(R"({"include_num_input_tokens_seen":"no"})").counts_input_tokens());
}

TEST_CASE("the arguments survive their JSON form", "[train][cpu]") {
  TrainingArguments args;
  args.learning_rate = 2e-4;
  args.data_seed = 3;
  args.completion_only_loss = false;
  args.resume_from_checkpoint = "out/checkpoint-10";
  const format::Json json = format::to_json(args);
  REQUIRE(format::to_json(read(json.dump())) == json);
}
