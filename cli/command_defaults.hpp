// SPDX-License-Identifier: Apache-2.0
/// --defaults of train and plan: a practitioner's values or transformers' and PEFT's, what was given in place of them, and what a
/// checkpoint decides (train/qlora_defaults.hpp).
#pragma once

#include <array>
#include <set>
#include <string>
#include <string_view>

#include "command_line.hpp"
#include "qlorapp/adapters/lora_config.hpp"
#include "qlorapp/format/model_config.hpp"
#include "qlorapp/memory/planner.hpp"
#include "qlorapp/train/plan_run.hpp"
#include "qlorapp/train/training_arguments.hpp"
#include "train/qlora_defaults.hpp"

namespace qlorapp::cli {

/// Options that memory_budget, auto_find_batch_size or a plan chooses. A checkpoint decides them for a resumed run.
inline constexpr std::array<std::string_view, 9> kChosenByPlan{"gradient_accumulation_steps",
                                                               "gradient_checkpointing",
                                                               "checkpoint_keep",
                                                               "loss_chunk_rows",
                                                               "mlp_tile_rows",
                                                               "weight_workspace",
                                                               "embedding_on_host",
                                                               "base_on_host",
                                                               "base_sharding"};

class CommandDefaults {
 public:
  /// Adds --defaults, and sets the values that help shows. Before the fields of `args` and `lora` are added.
  void add_to(CommandLine& line, TrainingArguments& args, LoraConfig& lora);
  /// After line.parse(): what was not given fits what was. @throws ValueError for another word than qlora or trainer.
  void settle(const CommandLine& line, TrainingArguments& args, LoraConfig& lora);
  /// Counts an option as given that another one stands for.
  void count_as_given(std::string_view name) { given_.emplace(name); }

  [[nodiscard]] bool are_qlora() const { return kind_ == "qlora"; }
  [[nodiscard]] IsGiven is_given() const {
    return [this](std::string_view name) { return given_.contains(std::string(name)); };
  }
  /// With layers_to_transform: the names of this model's linear layers.
  void settle_targets(LoraConfig& lora, const format::ModelConfig& model) const;
  /// Takes the values that are not given from the checkpoint that a run resumes from, even if a default has changed. Logs those that differ.
  /// A checkpoint that cannot be read changes nothing: resuming from it reports the damage.
  /// @param ranks  processes of the run: only several shard the base.
  void follow_checkpoint(const std::string& folder, TrainingArguments& args, LoraConfig& lora, int64_t ranks);
  /// The micro-batch for so many rows, and checkpointing where a step does not fit without it.
  void set_rows(TrainingArguments& args, int64_t rows, int64_t ranks) const;
  /// @returns whether a step needs gradient_checkpointing, which was left open.
  [[nodiscard]] bool turns_checkpointing_on(const TrainingArguments& args, const PlanSettings& settings, Bytes room) const;

  /// fit_arguments(). If nothing fits the budget that is the default: one row with gradient_checkpointing, and the error as `text`.
  /// @throws ValueError if nothing fits a given budget.
  [[nodiscard]] FittedArguments fit(const PlanSettings& settings, const TrainingArguments& args, const Gpu& rates,
                                    Bytes room) const;

  /// "defaults: learning_rate 0.0002, …": those in use. @param adapts  whether the adapter's are.
  [[nodiscard]] std::string line(const TrainingArguments& args, const LoraConfig& lora, bool adapts) const;

 private:
  std::string kind_ = "qlora";
  std::set<std::string> given_;
};

}  // namespace qlorapp::cli
