// SPDX-License-Identifier: Apache-2.0
// What the trainer writes and reads back: adapters, trainer_state.json, checkpoint folders.
#include <ATen/ATen.h>

#include <cmath>

#include <nlohmann/json.hpp>

#include "qlorapp/core/check.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/format/atomic_file.hpp"
#include "qlorapp/format/config_json.hpp"
#include "qlorapp/format/folder.hpp"
#include "qlorapp/format/python_json.hpp"
#include "qlorapp/io/adapter.hpp"
#include "qlorapp/io/checkpoint_folder.hpp"
#include "qlorapp/train/trainer.hpp"

namespace qlorapp {
/// trainer_state.json with the keys of transformers' TrainerState, so that scripts that plot log_history keep working.
void Trainer::write_trainer_state(const std::string& folder) const {
  using format::Json;
  Json json = Json::object();
  json["best_global_step"] = state_.best_global_step ? Json(*state_.best_global_step) : Json(nullptr);
  json["best_metric"] = state_.best_metric ? Json(*state_.best_metric) : Json(nullptr);
  json["best_model_checkpoint"] = state_.best_model_checkpoint.empty() ? Json(nullptr) : Json(state_.best_model_checkpoint);
  json["epoch"] = epoch();
  json["eval_steps"] = args_.eval_interval();
  json["global_step"] = state_.global_step;
  json["is_hyper_param_search"] = false;
  json["is_local_process_zero"] = true;
  json["is_world_process_zero"] = true;
  json["log_history"] = Json::array();
  for (const LogRecord& record : state_.log_history) json["log_history"].push_back(record.to_json());
  json["logging_steps"] = args_.logging_steps;
  json["max_steps"] = max_steps_;
  json["num_input_tokens_seen"] = state_.tokens_seen;
  json["num_train_epochs"] = epochs_;
  json["save_steps"] = args_.save_steps;
  json["stateful_callbacks"] = Json::object();
  json["total_flos"] = state_.total_flos;
  json["train_batch_size"] = args_.per_device_train_batch_size;
  json["trial_name"] = nullptr;
  json["trial_params"] = nullptr;
  format::write_file_atomically(format::path_in(folder, "trainer_state.json"),
                                format::dump_python_json(json, format::kConfigStyle) + "\n");
}

void Trainer::save_model(const std::string& folder) const {
  save_adapter(*model_, folder, base_model_);
  write_trainer_state(folder);
}

void Trainer::save_state(const std::string& folder) {
  read_losses();
  const DataCursor here = state_.cursor;
  if (at_epoch_end_) state_.cursor = {here.epoch + 1, 0};  // what a resumed run has to do next
  state_.save(folder);
  state_.cursor = here;
}

void Trainer::save_checkpoint() {
  read_losses();
  CheckpointWriter writer(args_.output_dir, state_.global_step);
  save_adapter(*model_, writer.folder(), base_model_);
  if (!args_.save_only_model) save_state(writer.folder());
  format::write_file_atomically(format::path_in(writer.folder(), "training_args.json"),
                                format::dump_python_json(format::to_json(args_), format::kConfigStyle) + "\n");
  if (state_.best_global_step) {
    const std::string best = format::path_in(args_.output_dir, concat("checkpoint-", *state_.best_global_step));
    if (*state_.best_global_step == state_.global_step || format::is_folder(best)) state_.best_model_checkpoint = best;
  }
  write_trainer_state(writer.folder());
  const std::string path = writer.commit();
  if (args_.save_total_limit && *args_.save_total_limit > 0) {
    prune_checkpoints(args_.output_dir, *args_.save_total_limit, {path, state_.best_model_checkpoint});
  }
  control_.should_save = false;
  if (callbacks_.on_save) callbacks_.on_save(path, control_);
}

void Trainer::finish() {
  const std::string& best = state_.best_model_checkpoint;
  if (args_.load_best_model_at_end && !best.empty()) {
    load_adapter(*model_, best);
    log_info(concat("[trainer] the adapters are those of ", best, ", ", args_.best_metric_name(), " ", *state_.best_metric));
  }
  event(TrainerEvent::kTrainEnd);
}

void Trainer::restore(const std::string& folder) {
  QLORAPP_CHECK_FORMAT(format::exists(format::path_in(folder, "trainer_state.json")), "[resume] ", folder,
                       " is no checkpoint: it has no trainer_state.json. Give a checkpoint-<step> folder.");
  const bool of_transformers = format::exists(format::path_in(folder, "optimizer.pt"));
  QLORAPP_CHECK_FORMAT(
      format::exists(format::path_in(folder, "run_state.json")), "[resume] ", folder, " has no run_state.json: ",
      of_transformers ? "it is a checkpoint of transformers' Trainer, whose optimizer.pt is a pickle file, and these can run code"
                      : "it holds the model alone (save_only_model)",
      ". Begin anew with its adapter, or resume from a whole checkpoint.");
  if (!callbacks_.log_evaluate_save) {
    load_adapter(*model_, folder);
    restore_history(folder);
  }
  state_.load(folder);
  QLORAPP_CHECK_FORMAT(state_.cursor.batch <= batches_per_epoch_, "[resume] ", folder, " stands at batch ", state_.cursor.batch,
                       " of an epoch that has ", batches_per_epoch_, " here. Give the data and batch size of that run.");
  if (args_.ignore_data_skip && state_.cursor.batch < batches_per_epoch_) state_.cursor.batch = 0;
}

void Trainer::restore_history(const std::string& folder) {
  const std::string path = format::path_in(folder, "trainer_state.json");
  const format::Json json = format::read_json_file(path, {.allow_nonfinite = true});
  const auto history = json.find("log_history");
  QLORAPP_CHECK_FORMAT(history != json.end() && history->is_array(), "[resume] ", path, " must hold a list 'log_history'.");
  state_.log_history.clear();
  for (const auto& entry : *history) state_.log_history.push_back(LogRecord::from_json(entry, path));
  if (const auto value = json.find("best_metric"); value != json.end() && value->is_number())
    state_.best_metric = value->get<double>();
  if (const auto value = json.find("best_global_step"); value != json.end() && value->is_number_integer())
    state_.best_global_step = value->get<int64_t>();
  if (const auto value = json.find("best_model_checkpoint"); value != json.end() && value->is_string()) {
    state_.best_model_checkpoint = value->get<std::string>();
    if (!format::is_folder(state_.best_model_checkpoint)) {
      log_warning(concat("[resume] the best checkpoint, ", state_.best_model_checkpoint, ", is not there any more."));
      state_.best_model_checkpoint.clear();
    }
  }
  if (const auto value = json.find("total_flos"); value != json.end() && value->is_number())
    state_.total_flos = value->get<double>();
}

}  // namespace qlorapp
