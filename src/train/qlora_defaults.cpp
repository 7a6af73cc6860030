// SPDX-License-Identifier: Apache-2.0
#include "train/qlora_defaults.hpp"

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "format/config_json.hpp"
#include "qlorapp/format/model_layout.hpp"

namespace qlorapp {
namespace {

using format::Json;

constexpr int64_t kRowsPerUpdate = 16;
/// Below this a small data set is hardly learned: 200 rows in 3 epochs are 37 updates of 16 rows.
constexpr int64_t kFewestUpdates = 100, kFewestRows = 4;

/// They decide what a step keeps; memory_budget sets them itself.
constexpr std::array<std::string_view, 9> kOfMemory{"gradient_checkpointing", "checkpoint_keep",      "loss_chunk_rows",
                                                    "mlp_tile_rows",          "weight_workspace",     "embedding_on_host",
                                                    "base_on_host",           "auto_find_batch_size", "cuda_graphs"};

template <class Config>
void add_changes(Json& into) {
  Config changed;
  set_qlora_defaults(changed);
  const Json values = format::to_json(changed), plain = format::to_json(Config{});
  for (const auto& [name, value] : values.items()) {
    if (value != plain[name]) into[name] = value;
  }
}

template <class Config>
void unset(Config& config, const IsGiven& given) {
  Json values = format::to_json(config);
  const Json plain = format::to_json(Config{}), changed = qlora_defaults();
  for (const auto& [name, value] : changed.items()) {
    if (plain.contains(name) && !given(name)) values[name] = plain[name];
  }
  format::from_json(values, config, "defaults");
}

/// PEFT looks at layers_to_transform only beside a list of names.
bool needs_names(const IsGiven& given) {
  return !given("target_modules") && (given("layers_to_transform") || given("layers_pattern"));
}

bool batch_is_open(const IsGiven& given) { return !given("per_device_train_batch_size"); }

}  // namespace

void set_qlora_defaults(TrainingArguments& args) {
  args.per_device_train_batch_size = kRowsPerUpdate;
  args.learning_rate = 2e-4;
  args.lr_scheduler_type = "cosine";
  args.warmup_ratio = 0.03;
  args.memory_budget = "auto";
  args.assistant_only_loss = true;
  args.logging_steps = 10;
}

void set_qlora_defaults(LoraConfig& lora) {
  lora.r = 16;
  lora.lora_alpha = 32;
  lora.target_modules = NamesOrPattern("all-linear");
}

Json qlora_defaults() {
  Json values = Json::object();
  add_changes<TrainingArguments>(values);
  add_changes<LoraConfig>(values);
  return values;
}

void unset_qlora_defaults(TrainingArguments& args, LoraConfig& lora, const IsGiven& given) {
  unset(args, given);
  unset(lora, given);
}

void settle_qlora_defaults(TrainingArguments& args, LoraConfig& lora, const IsGiven& given) {
  if (!given("lora_alpha")) lora.lora_alpha = 2 * static_cast<double>(lora.r);
  if (needs_names(given)) lora.target_modules = {};  // until settle_target_modules()
  const bool has_own_warmup = given("warmup_steps") || args.lr_scheduler_type == "constant";
  if (has_own_warmup && !given("warmup_ratio")) args.warmup_ratio = 0;
  set_rows_per_update(args, given, 0, 1);
  if (given("memory_budget")) return;
  const bool has_batch = !batch_is_open(given) || given("gradient_accumulation_steps");
  const bool has_memory = std::any_of(kOfMemory.begin(), kOfMemory.end(), given);
  if (has_batch || has_memory) args.memory_budget.clear();
  if (has_memory && !has_batch && !args.cuda_graphs && !given("auto_find_batch_size")) args.auto_find_batch_size = true;
}

void settle_target_modules(LoraConfig& lora, const format::ModelConfig& model, const IsGiven& given) {
  if (!needs_names(given)) return;
  lora.target_modules = NamesOrPattern(format::linear_words(model));
}

void set_rows_per_update(TrainingArguments& args, const IsGiven& given, int64_t rows, int64_t ranks) {
  if (!batch_is_open(given)) return;
  int64_t chosen = kRowsPerUpdate;
  const int64_t fewest = args.packing ? 1 : kFewestRows;  // a pack has several rows
  const double seen = args.num_train_epochs * static_cast<double>(rows);
  const bool counts = rows > 0 && args.max_steps <= 0;
  while (counts && chosen > fewest && seen < static_cast<double>(kFewestUpdates * chosen)) chosen /= 2;
  while (rows > 0 && chosen > rows) chosen /= 2;
  args.per_device_train_batch_size = std::max<int64_t>(1, chosen / (args.gradient_accumulation_steps * ranks));
}

bool needs_checkpointing(const TrainingArguments& args, const PlanSettings& settings, const IsGiven& given, Bytes available) {
  const bool is_open =
      args.memory_budget.empty() && !args.cuda_graphs && !given("gradient_checkpointing") && !given("checkpoint_keep");
  if (!is_open) return false;
  PlanSettings smallest = settings;
  if (args.auto_find_batch_size) smallest.batch = 1;
  return !plan_memory(smallest, available).fits;
}

}  // namespace qlorapp
