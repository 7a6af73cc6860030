// SPDX-License-Identifier: Apache-2.0
#include "command_defaults.hpp"

#include <optional>

#include "core/check.hpp"
#include "files/folder.hpp"
#include "format/config_json.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/format/adapter_config.hpp"
#include "train/run_inputs.hpp"

namespace qlorapp::cli {
namespace {

/// Takes the values of `from` that are no option of this command line. @returns "r 8, lora_alpha 8": those that change.
template <class Config>
std::string follow(Config& config, Config from, const IsGiven& given, int64_t ranks) {
  if constexpr (requires { from.base_sharding; }) {
    if (ranks == 1) from.base_sharding = config.base_sharding;  // one process holds the whole base
  }
  const format::Json theirs = format::to_json(from), defaults = qlora_defaults();
  format::Json own = format::to_json(config);
  std::string changes;
  const auto one = [&](const std::string& name) {
    if (!own.contains(name) || given(name) || own[name] == theirs[name]) return;
    own[name] = theirs[name];
    changes += message("{}{} {}", changes.empty() ? "" : ", ", name, detail::default_text(own[name]));
  };
  for (const auto& [name, value] : defaults.items()) one(name);
  for (const std::string_view name : kChosenByPlan) one(std::string(name));
  format::from_json(own, config, "resume");
  return changes;
}

}  // namespace

void CommandDefaults::add_to(CommandLine& line, TrainingArguments& args, LoraConfig& lora) {
  line.option("defaults", kind_,
              "qlora: those shown here, for adapters on a 4-bit base; trainer: those of transformers' TrainingArguments and PEFT's "
              "LoraConfig");
  set_qlora_defaults(args);
  set_qlora_defaults(lora);
}

void CommandDefaults::settle(const CommandLine& line, TrainingArguments& args, LoraConfig& lora) {
  QLORAPP_CHECK_VALUE(kind_ == "qlora" || kind_ == "trainer", "[defaults] must be qlora or trainer; got '{}'.", kind_);
  given_.merge(line.given());
  if (are_qlora()) settle_qlora_defaults(args, lora, is_given());
  else unset_qlora_defaults(args, lora, is_given());
}

void CommandDefaults::settle_targets(LoraConfig& lora, const format::ModelConfig& model) const {
  if (are_qlora()) settle_target_modules(lora, model, is_given());
}

void CommandDefaults::follow_checkpoint(const std::string& folder, TrainingArguments& args, LoraConfig& lora, int64_t ranks) {
  if (!are_qlora()) return;
  TrainingArguments before;
  LoraConfig adapter;
  try {
    before = read_arguments(folder);
    adapter = from_adapter_config(format::load_adapter_config(folder));
  } catch (const Error&) { return; }
  TrainingArguments followed = args;
  if (!given_.contains("memory_budget")) {  // what it chose is in the other values
    before.memory_budget.clear();
    followed.memory_budget.clear();
  }
  LoraConfig followed_adapter = lora;
  std::string changes = follow(followed, before, is_given(), ranks);
  const std::string of_adapter = follow(followed_adapter, adapter, is_given(), ranks);
  changes += (changes.empty() || of_adapter.empty() ? "" : ", ") + of_adapter;
  if (!changes.empty()) log_info(message("resume: as in {}: {}", folder, changes));
  args = std::move(followed);
  lora = std::move(followed_adapter);
  // Nothing below may change these: the checkpoint decides them.
  for (const char* name : {"per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing"})
    given_.emplace(name);
}

void CommandDefaults::set_rows(TrainingArguments& args, int64_t rows, int64_t ranks) const {
  if (are_qlora()) set_rows_per_update(args, is_given(), rows, ranks);
}

bool CommandDefaults::turns_checkpointing_on(const TrainingArguments& args, const PlanSettings& settings, Bytes room) const {
  return are_qlora() && needs_checkpointing(args, settings, is_given(), room);
}

FittedArguments CommandDefaults::fit(const PlanSettings& settings, const TrainingArguments& args, const Gpu& rates,
                                     Bytes room) const {
  if (!are_qlora() || given_.contains("memory_budget") || args.memory_budget.empty())
    return fit_arguments(settings, args, rates, room);
  try {
    // An amount of memory has no rates. What is fastest is chosen by those of a small card then.
    const bool has_rates = rates.bandwidth > 0 && rates.tensor_rate > 0;
    return fit_arguments(settings, args, has_rates ? rates : rates_of("another card", settings.device.architecture, room), room);
  } catch (const ValueError& error) {
    FittedArguments smallest{args, settings, error.what()};
    smallest.args.memory_budget.clear();
    smallest.args.gradient_checkpointing = true;
    smallest.args.per_device_train_batch_size = smallest.settings.batch = 1;
    smallest.settings.segments = parse_segments(smallest.args.keep_text(), settings.model.num_hidden_layers);
    if (plan_memory(smallest.settings, room).fits) throw;  // it is about something else
    return smallest;
  }
}

std::string CommandDefaults::line(const TrainingArguments& args, const LoraConfig& lora, bool adapts) const {
  if (!are_qlora()) return "defaults: those of transformers' TrainingArguments and PEFT's LoraConfig";
  format::Json values = format::to_json(args);
  if (adapts) values.update(format::to_json(lora));
  std::string text;
  const format::Json defaults = qlora_defaults();
  for (const auto& [name, value] : defaults.items()) {
    const std::string now = values.contains(name) ? detail::default_text(values[name]) : std::string();
    if (given_.contains(name) || now.empty()) continue;
    text += message("{}{} {}", text.empty() ? "" : ", ", name, now);
  }
  return text.empty() ? std::string() : message("defaults (--defaults trainer for transformers' and PEFT's): {}", text);
}

}  // namespace qlorapp::cli
