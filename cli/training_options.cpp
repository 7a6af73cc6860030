// SPDX-License-Identifier: Apache-2.0
#include "training_options.hpp"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string_view>

#include "core/check.hpp"
#include "files/folder.hpp"
#include "format/config_json.hpp"
#include "io/adapter_file.hpp"
#include "qlorapp/format/adapter_config.hpp"
#include "qlorapp/format/model_layout.hpp"
#include "qlorapp/io/adapter.hpp"
#include "qlorapp/io/compute_dtype.hpp"

namespace qlorapp::cli {

void group_training_fields(CommandLine& line) {
  line.group("Adapter", {"r", "lora_alpha", "lora_dropout", "target_modules", "modules_to_save", "use_rslora", "use_dora",
                         "init_lora_weights"});
  line.group("Length and batches", {"num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps",
                                    "auto_find_batch_size", "seed"});
  line.group("Optimizer and schedule",
             {"learning_rate", "lr_scheduler_type", "warmup_steps", "warmup_ratio", "optim", "weight_decay", "max_grad_norm"});
  line.group("Precision and speed", {"bf16", "fp16", "fp8"});
  line.group("Memory", {"gradient_checkpointing", "checkpoint_keep", "memory_budget"});
}

std::optional<at::ScalarType> requested_dtype(const CommandLine& line, const TrainingArguments& args,
                                              std::optional<at::ScalarType> named) {
  const char* const flag = args.bf16            ? "--bf16 true"
                           : args.fp16          ? "--fp16 true"
                           : line.given("bf16") ? "--bf16 false"
                                                : "--fp16 false";
  const bool given = args.bf16 || args.fp16 || line.given("bf16") || line.given("fp16");
  const at::ScalarType flagged = args.bf16 ? at::kBFloat16 : args.fp16 ? at::kHalf : at::kFloat;
  if (!given) return named;
  QLORAPP_CHECK_VALUE(!named || *named == flagged, "[dtype] --dtype {} and {} ask for different dtypes. Give one of them.",
                      dtype_text(named.value_or(flagged)), flag);
  return flagged;
}

void set_precision(TrainingArguments& args, at::ScalarType dtype) {
  QLORAPP_CHECK_VALUE(
      !args.fp8 || dtype == at::kBFloat16,
      "[fp8] --fp8 needs bfloat16 for the rest of the step; this run computes in {}. Give --bf16, or leave --fp8 out.",
      dtype_text(dtype));
  args.bf16 = dtype == at::kBFloat16;
  args.fp16 = dtype == at::kHalf;
}

LoraConfig config_of_adapter(const CommandLine& line, const LoraConfig& asked, const std::string& folder,
                             const format::ModelConfig& model) {
  /// What a file says about itself, not about the adapter.
  constexpr std::array<std::string_view, 4> kOfTheFile{"peft_version", "base_model_name_or_path", "revision", "inference_mode"};
  const LoraConfig own = as_config_asks(folder, [&] { return from_adapter_config(format::load_adapter_config(folder)); });
  QLORAPP_CHECK_VALUE(
      !brings_tables(folder, model.vocab_size),
      "[init_adapter] {} holds tables of its own (new tokens, or save_embedding_layers), which training does not save. "
      "Merge it: qlorapp merge --model BASE --adapter ADAPTER --output OUTPUT; then train the merged model.",
      folder);
  const std::vector<format::Parameter> layers = format::parameters(model, format::Role::kLinear);
  const format::Json theirs = format::to_json(own), ours = format::to_json(asked);
  for_each_field<LoraConfig>([&](const auto& field) {
    const std::string name(field.name);
    if (!line.given(name) || theirs[name] == ours[name] ||
        std::find(kOfTheFile.begin(), kOfTheFile.end(), field.name) != kOfTheFile.end())
      return;
    LoraConfig changed = own;
    changed.*field.member = asked.*field.member;
    // A list of names and a pattern may choose the same layers; other fields have one spelling.
    constexpr std::array<std::string_view, 6> kChoosing{"target_modules", "exclude_modules", "layers_to_transform",
                                                        "layers_pattern", "rank_pattern",    "alpha_pattern"};
    const bool chooses = std::find(kChoosing.begin(), kChoosing.end(), field.name) != kChoosing.end();
    const bool agrees = chooses && std::all_of(layers.begin(), layers.end(), [&](const format::Parameter& layer) {
                          const bool adapted = own.matches(layer.module);
                          return changed.matches(layer.module) == adapted &&
                                 (!adapted || (changed.rank_of(layer.module) == own.rank_of(layer.module) &&
                                               changed.scaling_of(layer.module) == own.scaling_of(layer.module)));
                        });
    QLORAPP_CHECK_VALUE(agrees,
                        "[init_adapter] {} must match the adapter: {} has {}; got {}. Leave the option out, or "
                        "leave --init_adapter out for a new adapter.",
                        name, folder, theirs[name].dump(), ours[name].dump());
  });
  return own;
}

}  // namespace qlorapp::cli
