// SPDX-License-Identifier: Apache-2.0
/// A run's arguments as the planner's settings, and the configuration that suits a deadline.
#pragma once

#include <cstdint>
#include <string>

#include "qlorapp/memory/gpu_table.hpp"
#include "qlorapp/memory/plan_report.hpp"
#include "qlorapp/memory/planner.hpp"
#include "qlorapp/nn/causal_lm.hpp"
#include "qlorapp/train/training_arguments.hpp"

namespace qlorapp {

/// A device that is here, as a plan sees it.
[[nodiscard]] ops::PlannedDevice planned_device(at::Device device);

/// How the base of a planned run is stored, and where it computes.
struct PlannedBase {
  bool load_in_4bit = true;
  Quantizer::Options quantization = {};
  bool keep_blocks = true;                                     ///< As in WeightOptions.
  std::vector<std::string> skip_modules = {};                  ///< Linear layers left dense.
  std::optional<at::ScalarType> compute_dtype = std::nullopt;  ///< Unset: as bf16 and fp16 of the arguments say.
  ops::PlannedDevice device = {};                              ///< A CPU unless given.
  int64_t ranks = 1;                                           ///< Processes, over which base_sharding shards the base.
};

/// All that the memory of a run depends on: of a model that is to be loaded. Rows have args.max_length tokens.
[[nodiscard]] PlanSettings plan_settings(const format::ModelConfig& model, const LoraConfig& lora, const TrainingArguments& args,
                                         const PlannedBase& base = {});
/// The same of a model that is loaded, over rows of which the longest has `longest` tokens. Settings that the arguments leave open (kept
/// activations, memory settings) are the model's. @param evaluates  the run has evaluation data.
[[nodiscard]] PlanSettings plan_settings(const CausalLM& model, const TrainingArguments& args, int64_t longest, bool evaluates);

/// The arguments that memory_budget or auto_find_batch_size chooses for rows of at most `settings.length` tokens; unchanged if neither
/// is set.
struct FittedArguments {
  TrainingArguments args;
  PlanSettings settings;  ///< The same for the planner.
  std::string text;       ///< The choice and its cost; empty without a budget.
};
/// @param settings  of the model, with its device; batch, accumulation, segments and memory are chosen here.
/// @throws ValueError if nothing fits, naming the cheapest ways out.
[[nodiscard]] FittedArguments fit_arguments(const PlanSettings& settings, const TrainingArguments& args, const Gpu& rates,
                                            Bytes available);
/// For a loaded model and its device's free memory.
[[nodiscard]] FittedArguments fit_arguments(const CausalLM& model, const TrainingArguments& args, int64_t longest, bool evaluates);

/// The line that Trainer logs when it begins: the plan of this model and these arguments over rows of which the longest has `longest`
/// tokens.
[[nodiscard]] std::string plan_line(const CausalLM& model, const TrainingArguments& args, int64_t longest, bool evaluates);

/// The peak that plan_line() states.
[[nodiscard]] Bytes planned_peak(const CausalLM& model, const TrainingArguments& args, int64_t longest, bool evaluates);

/// The memory of a step of one row of `longest` tokens beside the memory available, and settings that reduce it.
[[nodiscard]] std::string advice_when_full(const CausalLM& model, const TrainingArguments& args, int64_t longest);

struct Deadline {
  int64_t dataset_rows = 0;
  int64_t average_tokens = 0;
  double hours = 0;
  int64_t gpus = 1;  ///< Above 1: the configuration is that of each of so many processes, one per GPU.
  int64_t effective_batch = 32;
};

struct Recommendation {
  TrainingArguments args;
  LoraConfig lora;
  MemoryPlan plan;
  double hours = 0;          ///< Expected, on all GPUs.
  double hours_at_most = 0;  ///< With the uncertainty of the rates.
  double epochs = 0;
  std::string text;  ///< Why.
};

/// The fastest batch and keep policy that fits the card, and as many of `args.num_train_epochs` epochs as surely end in time.
/// @param args  what the caller has decided already: max_length, learning rate …; batch, accumulation, precision and
/// checkpointing are
///              chosen here.
/// @throws ValueError naming what is missing or impossible: no row fits the card, no step fits the deadline.
[[nodiscard]] Recommendation recommend(const format::ModelConfig& model, const LoraConfig& lora, const TrainingArguments& args,
                                       const Gpu& gpu, const Deadline& deadline, const DeviceAllowance& allowance);

}  // namespace qlorapp
