// SPDX-License-Identifier: Apache-2.0
/// The defaults of the command: those of a QLoRA practitioner, in one place. TrainingArguments and LoraConfig keep transformers' and PEFT's.
///
/// What a person gives always wins: IsGiven says whether an option was given by its name, and such an option is never changed.
///
/// Source: Dettmers et al. 2023, arXiv:2305.14314 (learning rate 2e-4, adapters on all linear layers, 16 rows per update); a warm-up of 3 %
/// and a cosine are what Alpaca's and most later recipes use. docs/adr/0028-defaults-of-the-command.md has the alternatives.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

#include "qlorapp/adapters/lora_config.hpp"
#include "qlorapp/core/units.hpp"
#include "qlorapp/format/model_config.hpp"
#include "qlorapp/json/json.hpp"
#include "qlorapp/memory/planner.hpp"
#include "qlorapp/train/training_arguments.hpp"

namespace qlorapp {

using IsGiven = std::function<bool(std::string_view name)>;

/// Sets the values that differ from transformers' and PEFT's. Before options are read.
void set_qlora_defaults(TrainingArguments& args);
void set_qlora_defaults(LoraConfig& lora);

/// {name: value} of all of them, in the order of the field tables. They are set by the two functions above and nowhere else.
[[nodiscard]] format::Json qlora_defaults();

/// Back to transformers' and PEFT's, except for what was given.
void unset_qlora_defaults(TrainingArguments& args, LoraConfig& lora, const IsGiven& given);

/// Makes values that were not given fit those that were:
///   lora_alpha                   is 2·r;
///   warmup_ratio                 is 0 with warmup_steps or a constant rate;
///   per_device_train_batch_size  is what accumulation leaves of the rows per update;
///   memory_budget                decides micro-batch and checkpointing only if nothing of both is given. A batch or accumulation that is given is
///                                not changed; with memory options alone, auto_find_batch_size finds the micro-batch.
void settle_qlora_defaults(TrainingArguments& args, LoraConfig& lora, const IsGiven& given);

/// With layers_to_transform or layers_pattern, which need a list of names: all-linear spelled out for this model, unless target_modules was given.
void settle_target_modules(LoraConfig& lora, const format::ModelConfig& model, const IsGiven& given);

/// The micro-batch of a run over `rows` rows, unless a batch was given: 16 rows per update over all ranks, halved, down to 4 (packs: 1),
/// while the run would have fewer than 100 updates, and while there are fewer rows. @param rows  0: unknown.
void set_rows_per_update(TrainingArguments& args, const IsGiven& given, int64_t rows, int64_t ranks);

/// gradient_checkpointing, where it was left open and no budget decides: on if a step does not fit without it.
/// @param settings  of these arguments. @returns whether it was turned on.
[[nodiscard]] bool needs_checkpointing(const TrainingArguments& args, const PlanSettings& settings, const IsGiven& given,
                                       Bytes available);

}  // namespace qlorapp
