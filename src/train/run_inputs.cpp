// SPDX-License-Identifier: Apache-2.0
#include "train/run_inputs.hpp"

#include <algorithm>
#include <array>
#include <string_view>

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "core/mix.hpp"
#include "files/atomic_file.hpp"
#include "files/folder.hpp"
#include "files/json_file.hpp"
#include "format/config_json.hpp"
#include "json/json_fields.hpp"
#include "json/python_json.hpp"
#include "nn/base_fingerprint.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/format/model_config.hpp"

namespace qlorapp {
namespace {

constexpr std::string_view kArgumentsFile = "training_args.json";

/// They affect the results of a step. What decides rows (max_length, packing, completion_only_loss) shows in the rows.
constexpr std::array<std::string_view, 18> kDecisive{"learning_rate",
                                                     "lr_scheduler_type",
                                                     "lr_scheduler_kwargs",
                                                     "warmup_steps",
                                                     "warmup_ratio",
                                                     "weight_decay",
                                                     "adam_beta1",
                                                     "adam_beta2",
                                                     "adam_epsilon",
                                                     "max_grad_norm",
                                                     "fp8",
                                                     "count_position_zero",
                                                     "dataloader_drop_last",
                                                     "seed",
                                                     "bf16",
                                                     "fp16",
                                                     "ddp_sum_in_bf16",
                                                     "val_size"};
/// Compared in another way, or of this start alone.
constexpr std::array<std::string_view, 13> kSkipped{"output_dir",
                                                    "overwrite_output_dir",
                                                    "resume_from_checkpoint",
                                                    "ignore_data_skip",
                                                    "per_device_train_batch_size",
                                                    "gradient_accumulation_steps",
                                                    "data_seed",
                                                    "group_by_length",
                                                    "train_sampling_strategy",
                                                    "use_cpu",
                                                    "resume_with_changes",
                                                    "on_non_finite",
                                                    "optim"};

bool is_in(std::string_view name, const auto& names) { return std::find(names.begin(), names.end(), name) != names.end(); }

/// "learning_rate 0.0002 → 0.0001".
std::string change(std::string_view name, const std::string& before, const std::string& now) {
  return message("{} {} → {}", name, before, now);
}

void append(std::string& list, const std::string& entry) { list += (list.empty() ? "" : ", ") + entry; }

/// A base whose config.json computes something else from the same weights is another base.
void check_base_config(const std::string& folder, const RunInputs& saved, const RunInputs& inputs) {
  std::string changes, unknown;
  for (const auto& [name, value] : inputs.base_config) {
    const auto before = std::find_if(saved.base_config.begin(), saved.base_config.end(),
                                     [&name = name](const auto& field) { return field.first == name; });
    if (before == saved.base_config.end()) {
      append(unknown, name);
      continue;
    }
    const format::Json was = format::parse_json(before->second, folder);
    // The file sorts keys, and format::Json compares their order.
    const nlohmann::json sorted = was;
    const nlohmann::json sorted_now = format::parse_json(value, folder);
    if (sorted != sorted_now) append(changes, change(name, format::shown(was), value));
  }
  for (const auto& [name, value] : saved.base_config) {  // a field that is recorded only where it is set
    const bool is_known = std::any_of(inputs.base_config.begin(), inputs.base_config.end(),
                                      [&name = name](const auto& field) { return field.first == name; });
    if (!is_known) append(changes, change(name, format::shown(format::parse_json(value, folder)), "unset"));
  }
  QLORAPP_CHECK_FORMAT(
      changes.empty(),
      "[resume] {} belongs to a base whose config.json computes something else: {}. Give the config.json of that run.", folder,
      changes);
  if (!unknown.empty())
    log_warning(message("[resume] {} does not say these fields of its base's config.json, which could not be compared: {}.", folder,
                        unknown));
}

uint64_t row_sum(const Example& row) {
  uint64_t sum = 0;
  for (size_t i = 0; i < row.input_ids.size(); ++i) {
    const uint64_t word =
        (static_cast<uint64_t>(static_cast<uint32_t>(row.labels[i])) << 32) | static_cast<uint32_t>(row.input_ids[i]);
    sum += mixed(word ^ (i * kMixPosition));
  }
  for (const int64_t length : row.row_lengths) sum = mixed(sum) + static_cast<uint64_t>(length);
  return sum ^ row.input_ids.size();
}

}  // namespace

uint64_t data_fingerprint(const std::vector<Example>& rows) {
  uint64_t value = rows.size();
  for (const Example& row : rows) value = mixed(value + kMixPosition) ^ mixed(row_sum(row));
  return value;
}

void write_arguments(const std::string& folder, const TrainingArguments& args) {
  files::write_file_atomically(files::path_in(folder, kArgumentsFile),
                               format::dump_python_json(format::to_json(args), format::kConfigStyle) + "\n");
}

TrainingArguments read_arguments(const std::string& folder) {
  const std::string path = files::path_in(folder, kArgumentsFile);
  TrainingArguments args;
  format::from_json(files::read_json_inside(path), args, path);
  try {
    args.validate();
  } catch (const ValueError& error) { throw FormatError(message("[resume] {}: {}", path, error.what())); }
  return args;
}

RunInputs base_inputs(const CausalLM& model) {
  const BaseFingerprint base = base_fingerprint(model);
  RunInputs inputs;
  inputs.base = base.whole;
  inputs.base_without_scales = base.without_scales;
  inputs.base_config = format::computed_fields(model.config());
  inputs.device = c10::DeviceTypeName(model.device().type(), /*lower_case=*/true);
  return inputs;
}

void check_base(const std::string& folder, const RunInputs& saved, const RunInputs& inputs) {
  QLORAPP_CHECK_FORMAT(
      inputs.base == saved.base || (inputs.device != saved.device && inputs.base_without_scales == saved.base_without_scales),
      "[resume] {} belongs to another base model, or to this one quantized differently or in another precision "
      "(--bf16, --fp16). Give the model and precision of that run.",
      folder);
  check_base_config(folder, saved, inputs);
  if (inputs.base != saved.base) log_info("[resume] the scales of the base differ in rounding from those of that run's device.");
}

ChangedInputs check_inputs(const std::string& folder, const TrainingArguments& args, const RunInputs& inputs,
                           const std::vector<std::string>& other_text) {
  const RunInputs saved = RunInputs::load(folder);
  check_base(folder, saved, inputs);
  const std::string path = files::path_in(folder, kArgumentsFile);
  const TrainingArguments before = read_arguments(folder);
  constexpr int64_t kMost = int64_t{1} << 20;  // so that no product of counts overflows
  QLORAPP_CHECK_FORMAT(std::max({before.per_device_train_batch_size, before.gradient_accumulation_steps, saved.ranks}) <= kMost,
                       "[resume] {}: per_device_train_batch_size, gradient_accumulation_steps and the number of ranks may be at "
                       "most {}.",
                       path, kMost);
  const format::Json was = format::to_json(before), is = format::to_json(args);
  std::string decisive, others;
  for (const auto& [name, value] : is.items()) {
    if (value == was[name] || is_in(name, kSkipped)) continue;
    append(is_in(name, kDecisive) ? decisive : others, change(name, was[name].dump(), value.dump()));
  }
  const auto rows = [](const TrainingArguments& a, int64_t ranks) {
    return message("{} x {} x {}", a.per_device_train_batch_size, a.gradient_accumulation_steps, ranks);
  };
  const std::string rows_before = rows(before, saved.ranks), rows_now = rows(args, inputs.ranks);
  if (rows_before != rows_now) {
    const bool equal = before.per_device_train_batch_size * before.gradient_accumulation_steps * saved.ranks ==
                       args.per_device_train_batch_size * args.gradient_accumulation_steps * inputs.ranks;
    // A dropout mask belongs to a micro-batch; with equal ones, only the rounding of sums depends on which process computes them.
    const bool same_masks = inputs.lora_dropout == 0 || before.per_device_train_batch_size == args.per_device_train_batch_size;
    append(equal && same_masks ? others : decisive,
           change("per_device_train_batch_size x gradient_accumulation_steps x processes", rows_before, rows_now));
  }
  if (before.optimizer_is_8bit() != args.optimizer_is_8bit()) append(decisive, change("optim", before.optim, args.optim));
  if (before.sampling() != args.sampling()) append(decisive, change("train_sampling_strategy", before.sampling(), args.sampling()));
  const int64_t order_before = before.data_seed.value_or(before.seed), order = args.data_seed.value_or(args.seed);
  if (order_before != order) append(decisive, change("data_seed", message("{}", order_before), message("{}", order)));
  if (saved.lora_dropout != inputs.lora_dropout)
    append(decisive, change("lora_dropout", message("{}", saved.lora_dropout), message("{}", inputs.lora_dropout)));
  if (saved.train_data != inputs.train_data) append(decisive, "the training data (other rows, or another order of them)");
  for (const std::string& file : other_text) append(saved.train_data != inputs.train_data ? decisive : others, file);
  if (saved.eval_data != inputs.eval_data) append(others, "the evaluation data");
  if (!others.empty()) log_info(message("[resume] other than in the run that wrote {}: {}.", folder, others));
  QLORAPP_CHECK_FORMAT(decisive.empty() || args.resume_with_changes,
                       "[resume] {} is of a run with other inputs: {}{}. Give those of that run, or resume_with_changes=True "
                       "(--resume_with_changes) to continue with the new ones.",
                       folder, decisive, others.empty() ? std::string() : message(" (also {})", others));
  if (!decisive.empty()) log_warning(message("[resume] this run continues {} with other inputs: {}.", folder, decisive));
  return {!decisive.empty(), before.per_device_train_batch_size};
}

}  // namespace qlorapp
