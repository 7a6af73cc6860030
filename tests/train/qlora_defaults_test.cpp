// SPDX-License-Identifier: Apache-2.0
#include "train/qlora_defaults.hpp"

#include <set>
#include <string>

#include "catch.hpp"
#include "format/config_json.hpp"

using namespace qlorapp;

namespace {

struct Settled {
  TrainingArguments args;
  LoraConfig lora;
};

/// The arguments after `given` values, as JSON, were read over the defaults.
Settled settled(const std::string& given, int64_t rows = 0, int64_t ranks = 1) {
  const format::Json values = format::parse_json(given, "test");
  const IsGiven is_given = [&](std::string_view name) { return values.contains(name); };
  Settled run;
  set_qlora_defaults(run.args);
  set_qlora_defaults(run.lora);
  format::Json args = format::to_json(run.args), lora = format::to_json(run.lora);
  for (const auto& [name, value] : values.items()) (args.contains(name) ? args : lora)[name] = value;
  format::from_json(args, run.args, "test");
  format::from_json(lora, run.lora, "test");
  settle_qlora_defaults(run.args, run.lora, is_given);
  set_rows_per_update(run.args, is_given, rows, ranks);
  REQUIRE_NOTHROW(run.args.validate());
  REQUIRE_NOTHROW(run.lora.validate());
  return run;
}

}  // namespace

TEST_CASE("unsetting the command's defaults leaves the library's and what was given", "[train][cpu]") {
  Settled run;
  set_qlora_defaults(run.args);
  set_qlora_defaults(run.lora);
  REQUIRE(format::to_json(run.args) != format::to_json(TrainingArguments{}));
  run.args.learning_rate = 0.5;
  unset_qlora_defaults(run.args, run.lora, [](std::string_view name) { return name == "learning_rate"; });
  TrainingArguments plain;
  plain.learning_rate = 0.5;
  REQUIRE(format::to_json(run.args) == format::to_json(plain));
  REQUIRE(format::to_json(run.lora) == format::to_json(LoraConfig{}));
}

TEST_CASE("a batch or an accumulation that is given is not changed by memory_budget", "[train][cpu]") {
  const Settled open = settled("{}");
  CHECK(open.args.memory_budget == "auto");
  CHECK(open.args.per_device_train_batch_size * open.args.gradient_accumulation_steps == 16);
  const Settled batch = settled(R"({"per_device_train_batch_size": 3})", 1000);
  CHECK(batch.args.memory_budget.empty());
  CHECK(batch.args.per_device_train_batch_size == 3);
  CHECK(batch.args.gradient_accumulation_steps == 1);
  const Settled accumulation = settled(R"({"gradient_accumulation_steps": 4})", 1000);
  CHECK(accumulation.args.memory_budget.empty());
  CHECK(accumulation.args.per_device_train_batch_size == 4);
  CHECK(accumulation.args.gradient_accumulation_steps == 4);
  const Settled both = settled(R"({"per_device_train_batch_size": 2, "memory_budget": "3GiB"})");
  CHECK(both.args.memory_budget == "3GiB");
}

TEST_CASE("memory options that are given stay, and the micro-batch is found for them", "[train][cpu]") {
  for (const char* given : {R"({"gradient_checkpointing": true})", R"({"loss_chunk_rows": 64})", R"({"base_on_host": true})"}) {
    const Settled run = settled(given);
    CHECK(run.args.memory_budget.empty());
    CHECK(run.args.auto_find_batch_size);
  }
  CHECK_FALSE(settled(R"({"auto_find_batch_size": false})").args.auto_find_batch_size);
  CHECK_FALSE(settled(R"({"cuda_graphs": true})").args.auto_find_batch_size);  // its memory is not planned
}

TEST_CASE("few rows get smaller updates and ranks share one", "[train][cpu]") {
  const auto rows_of_update = [](int64_t rows, const std::string& given = "{}") {
    return settled(given, rows).args.per_device_train_batch_size;
  };
  CHECK(rows_of_update(0) == 16);
  CHECK(rows_of_update(534) == 16);
  CHECK(rows_of_update(533) == 8);  // 1599 of 1600 rows in three epochs
  CHECK(rows_of_update(200) == 4);
  CHECK(rows_of_update(20) == 4);
  CHECK(rows_of_update(3) == 2);
  CHECK(rows_of_update(200, R"({"max_steps": 50})") == 16);
  CHECK(rows_of_update(12, R"({"packing": true})") == 1);
  CHECK(settled("{}", 1000, 4).args.per_device_train_batch_size == 4);
  CHECK(settled("{}", 1000, 64).args.per_device_train_batch_size == 1);
}

TEST_CASE("values that depend on others follow those that are given", "[train][cpu]") {
  CHECK(settled(R"({"r": 64})").lora.lora_alpha == 128);
  CHECK(settled(R"({"r": 64, "lora_alpha": 16})").lora.lora_alpha == 16);
  CHECK(settled(R"({"warmup_steps": 5})").args.warmup_ratio == 0);
  CHECK(settled(R"({"lr_scheduler_type": "constant"})").args.warmup_ratio == 0);
  CHECK(settled(R"({"lr_scheduler_type": "linear"})").args.warmup_ratio == 0.03);
}

TEST_CASE("layers_to_transform gets all linear layers by name", "[train][cpu]") {
  format::ModelConfig model;
  model.family = &format::families().front();
  model.num_hidden_layers = 2;
  model.hidden_size = 8;
  model.intermediate_size = 16;
  model.num_attention_heads = model.num_key_value_heads = 2;
  model.head_dim = 4;
  Settled run = settled(R"({"layers_to_transform": [1]})");
  settle_target_modules(run.lora, model, [](std::string_view name) { return name == "layers_to_transform"; });
  const std::set<std::string> names(run.lora.target_modules.names.begin(), run.lora.target_modules.names.end());
  CHECK(names == std::set<std::string>{"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"});
}
