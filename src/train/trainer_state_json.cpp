// SPDX-License-Identifier: Apache-2.0
#include "train/trainer_state_json.hpp"

#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "core/printable.hpp"
#include "files/atomic_file.hpp"
#include "files/folder.hpp"
#include "files/json_file.hpp"
#include "json/python_json.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/json/json.hpp"

namespace qlorapp {
namespace {

/// As transformers names its callback and its counter.
constexpr const char *kEarlyStopping = "EarlyStoppingCallback", *kCounter = "early_stopping_patience_counter";

/// 0 where the run had no early stopping.
int64_t counter_of(const format::Json& json, const std::string& path) {
  const format::Json::json_pointer place(message("/stateful_callbacks/{}/attributes/{}", kEarlyStopping, kCounter));
  if (!json.contains(place)) return 0;
  const format::Json& value = json.at(place);
  constexpr int64_t kLargest = int64_t{1} << 42;
  QLORAPP_CHECK_FORMAT(value.is_number_integer() && value.get<int64_t>() >= 0 && value.get<int64_t>() <= kLargest,
                       "[resume] {}: '{}' must be an integer from 0 to {}.", path, kCounter, kLargest);
  return value.get<int64_t>();
}

}  // namespace

void write_trainer_state(const std::string& folder, const TrainState& state, const TrainingArguments& args,
                         const RunLength& length) {
  using format::Json;
  Json json = Json::object();
  json["best_global_step"] = state.best_global_step ? Json(*state.best_global_step) : Json(nullptr);
  json["best_metric"] = state.best_metric ? Json(*state.best_metric) : Json(nullptr);
  json["best_model_checkpoint"] = state.best_model_checkpoint.empty() ? Json(nullptr) : Json(state.best_model_checkpoint);
  json["epoch"] = length.epoch;
  json["eval_steps"] = args.eval_interval();
  json["global_step"] = state.global_step;
  json["is_hyper_param_search"] = false;
  json["is_local_process_zero"] = true;
  json["is_world_process_zero"] = true;
  json["log_history"] = Json::array();
  json["logging_steps"] = args.logging_steps;
  json["max_steps"] = length.max_steps;
  json["num_input_tokens_seen"] = state.tokens_seen;
  json["num_train_epochs"] = length.epochs;
  json["save_steps"] = args.save_steps;
  json["stateful_callbacks"] = Json::object();
  if (args.early_stopping_patience) {
    json["stateful_callbacks"][kEarlyStopping] = {
        {"args",
         {{"early_stopping_patience", *args.early_stopping_patience}, {"early_stopping_threshold", args.early_stopping_threshold}}},
        {"attributes", {{kCounter, state.evaluations_without_gain}}}};
  }
  json["total_flos"] = state.total_flos;
  json["train_batch_size"] = args.per_device_train_batch_size;
  json["trial_name"] = nullptr;
  json["trial_params"] = nullptr;
  std::string text = format::dump_python_json(json, format::kConfigStyle) + "\n";
  if (!state.log_history.empty()) {
    constexpr std::string_view kEmpty = "\"log_history\": [";  // quotes within strings have a backslash: it is there once
    text.insert(text.find(kEmpty) + kEmpty.size(), state.log_history.text() + "\n  ");
  }
  files::write_file_atomically(files::path_in(folder, "trainer_state.json"), text);
}

void read_trainer_history(const std::string& folder, TrainState& state) {
  const std::string path = files::path_in(folder, "trainer_state.json");
  const format::Json json = files::read_json_inside(path, {.allow_nonfinite = true});
  const auto history = json.find("log_history");
  QLORAPP_CHECK_FORMAT(history != json.end() && history->is_array(), "[resume] {} must hold a list 'log_history'.", path);
  state.log_history.clear();
  state.evaluations_without_gain = counter_of(json, path);
  for (const auto& entry : *history) state.log_history.push_back(LogRecord::from_json(entry, path));
  if (const auto value = json.find("best_metric"); value != json.end() && value->is_number())
    state.best_metric = value->get<double>();
  if (const auto value = json.find("best_global_step"); value != json.end() && value->is_number_integer())
    state.best_global_step = value->get<int64_t>();
  if (const auto value = json.find("best_model_checkpoint"); value != json.end() && value->is_string()) {
    // By its name: the run may have been moved, and a file must not lead elsewhere.
    const std::string name = files::file_name(value->get<std::string>());
    const std::string best = files::path_in(files::parent_of(folder), name);
    const bool is_there = name.starts_with("checkpoint-") && files::is_folder(best);
    state.best_model_checkpoint = is_there ? best : "";
    if (!is_there) log_warning(message("[resume] the best checkpoint, {}, is not beside {}.", printable(name), folder));
  }
  if (const auto value = json.find("total_flos"); value != json.end() && value->is_number())
    state.total_flos = value->get<double>();
}

}  // namespace qlorapp
