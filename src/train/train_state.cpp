// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/train/train_state.hpp"

#include <ATen/ATen.h>

#include <charconv>
#include <string_view>

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "files/atomic_file.hpp"
#include "files/folder.hpp"
#include "files/json_file.hpp"
#include "format/config_json.hpp"
#include "io/tensor_file.hpp"
#include "json/python_json.hpp"
#include "train/run_state_reader.hpp"

namespace qlorapp {
namespace {

constexpr std::string_view kOptimizerFile = "optimizer.safetensors";
constexpr std::string_view kScalerFile = "scaler.json";

std::string hexadecimal(uint64_t value) {
  char buffer[17];
  return {buffer, std::to_chars(buffer, buffer + sizeof buffer, value, 16).ptr};
}

}  // namespace

void TrainState::save(const std::string& folder) const {
  write_tensors(files::path_in(folder, kOptimizerFile), optimizer.state_tensors());
  if (const auto scale = scaler.state_dict()) {
    files::write_file_atomically(files::path_in(folder, kScalerFile),
                                 format::dump_python_json(format::to_json(*scale), format::kConfigStyle));
  }
  format::Json json = format::Json::object();
  json["schema"] = kRunStateSchema;
  json["optimizer_step"] = optimizer.step_count();
  json["seed"] = hexadecimal(seed);
  json["micro_step"] = micro_step;
  json["global_step"] = global_step;
  json["epoch"] = cursor.epoch;
  json["batch"] = cursor.batch;
  json["tokens_seen"] = tokens_seen;
  json["skipped_steps"] = skipped_steps;
  json["skips_in_a_row"] = skips_in_a_row;
  json["rollbacks"] = rollbacks;
  json["loss_sum"] = loss_sum;
  json["loss_since_log"] = loss_since_log;
  json["steps_since_log"] = steps_since_log;
  json["last_loss"] = last_loss;
  json["last_grad_norm"] = last_grad_norm;
  json["last_learning_rate"] = last_learning_rate;
  json["owes_log"] = int{owes_log};
  json["owes_evaluation"] = int{owes_evaluation};
  json["owes_save"] = int{owes_save};
  json["owes_epoch_end"] = int{owes_epoch_end};
  json["lora_dropout"] = inputs.lora_dropout;
  json["train_data"] = hexadecimal(inputs.train_data);
  json["eval_data"] = hexadecimal(inputs.eval_data);
  json["base_fingerprint"] = hexadecimal(inputs.base);
  json["base_without_scales"] = hexadecimal(inputs.base_without_scales);
  json["base_config"] = format::Json::object();
  for (const auto& [name, value] : inputs.base_config) json["base_config"][name] = format::parse_json(value, name);
  json["device"] = inputs.device;
  json["ranks"] = inputs.ranks;
  files::write_file_atomically(files::path_in(folder, kRunStateFile), format::dump_python_json(json, format::kConfigStyle));
}

RunInputs RunInputs::load(const std::string& folder) {
  const RunStateReader reader(folder);
  RunInputs inputs;
  reader.number("lora_dropout", inputs.lora_dropout);
  reader.bits("train_data", inputs.train_data);
  reader.bits("eval_data", inputs.eval_data);
  reader.bits("base_fingerprint", inputs.base);
  reader.bits("base_without_scales", inputs.base_without_scales);
  reader.values("base_config", inputs.base_config);
  reader.text("device", inputs.device);
  reader.integer("ranks", inputs.ranks);
  return inputs;
}

void TrainState::load(const std::string& folder) {
  const RunStateReader reader(folder);
  int64_t optimizer_step = 0;
  reader.integer("optimizer_step", optimizer_step);
  reader.bits("seed", seed);
  reader.integer("micro_step", micro_step);
  reader.integer("global_step", global_step);
  reader.integer("epoch", cursor.epoch);
  reader.integer("batch", cursor.batch);
  reader.integer("tokens_seen", tokens_seen);
  reader.integer("skipped_steps", skipped_steps);
  reader.integer("skips_in_a_row", skips_in_a_row);
  reader.integer("rollbacks", rollbacks);
  reader.number("loss_sum", loss_sum);
  reader.number("loss_since_log", loss_since_log);
  reader.integer("steps_since_log", steps_since_log);
  reader.number("last_loss", last_loss);
  reader.number("last_grad_norm", last_grad_norm);
  reader.number("last_learning_rate", last_learning_rate);
  reader.integer("owes_log", owes_log);
  reader.integer("owes_evaluation", owes_evaluation);
  reader.integer("owes_save", owes_save);
  reader.integer("owes_epoch_end", owes_epoch_end);

  const std::string tensors = files::path_in(folder, kOptimizerFile);
  const format::SafetensorsFile file(files::FileReader::open_inside(tensors));
  for (auto& [name, tensor] : optimizer.state_tensors()) {
    const format::TensorEntry& entry = file.at(name);
    const at::Tensor stored = read_tensor(file, entry);
    QLORAPP_CHECK_FORMAT(stored.sizes() == tensor.sizes() && stored.scalar_type() == tensor.scalar_type(),
                         "[resume] {}: '{}' must have shape {} for these adapters and this optim; got {}.", tensors, name,
                         joined(tensor.sizes()), joined(stored.sizes()));
    tensor.copy_(stored);
  }
  optimizer.set_step_count(optimizer_step);
  if (scaler.is_enabled()) {
    const std::string scaler_path = files::path_in(folder, kScalerFile);
    GradScaler::State state;
    format::from_json(files::read_json_inside(scaler_path), state, scaler_path);
    scaler.load_state_dict(state);
  }
}

}  // namespace qlorapp
