// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/train/trainer.hpp"

#include <ATen/ATen.h>
#include <ATen/Context.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "format/atomic_file.hpp"
#include "format/config_json.hpp"
#include "format/folder.hpp"
#include "format/python_json.hpp"
#include "io/checkpoint_folder.hpp"
#include "nn/base_fingerprint.hpp"
#include "nn/decoder.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/data/packing.hpp"
#include "qlorapp/io/adapter.hpp"
#include "qlorapp/io/device.hpp"
#include "qlorapp/train/evaluate.hpp"
#include "qlorapp/train/plan_run.hpp"
#include "speed.hpp"
#include "train/trainer_state_json.hpp"
#include "train/unread_losses.hpp"
#include "train/window_runner.hpp"

namespace qlorapp {
namespace {

int64_t batch_count(size_t rows, int64_t batch_size, bool drop_last) {
  const auto n = static_cast<int64_t>(rows);
  return drop_last ? n / batch_size : (n + batch_size - 1) / batch_size;
}

/// On a GPU a wrong id could only become NaN.
void check_vocabulary(const std::vector<Example>& rows, const char* name, int64_t size) {
  for (size_t row = 0; row < rows.size(); ++row) {
    for (const int64_t id : rows[row].input_ids) {
      QLORAPP_CHECK_VALUE(
          id >= 0 && id < size,
          "[trainer] {}: token ids must be from 0 to {}, the vocabulary's last; row {} has {}. Use the tokenizer of this model.",
          name, size - 1, row, id);
    }
    for (const int64_t label : rows[row].labels) {
      QLORAPP_CHECK_VALUE(label == Example::kIgnored || (label >= 0 && label < size),
                          "[trainer] {}: labels must be {} (ignored) or from 0 to {}, the vocabulary's last; row {} has {}. Use "
                          "the tokenizer of this model.",
                          name, int64_t{Example::kIgnored}, size - 1, row, label);
    }
  }
}

void pack_rows(std::vector<Example>& rows, const TrainingArguments& args, const char* name) {
  if (rows.empty()) return;
  Packed packed = pack(rows, args.max_length, packing_strategy(args.packing_strategy));
  log_info(message("[packing] {}: {}", name, packed.line(args.max_length)));
  rows = std::move(packed.examples);
}

AdamW::Options optimizer_options(const TrainingArguments& args) {
  return {args.adam_beta1,
          args.adam_beta2,
          args.adam_epsilon,
          args.weight_decay,
          args.optimizer_is_8bit() ? AdamW::State::kEightBit : AdamW::State::kFloat32,
          args.optimizer_is_paged()};
}

/// torch's defaults, with a floor and an end: a run whose steps are all skipped is not training, and says so.
GradScaler::Options scaler_options(at::Device device, bool computes_in_half, const TrainingArguments& args) {
  GradScaler::Options options;
  options.device = device.type();
  // On a GPU without bf16, bf16 is float16 (io/device.hpp) and needs what float16 needs.
  options.enabled = args.fp16 || (device.is_cuda() && computes_in_half);
  options.min_scale = 1.0;
  options.max_consecutive_skips = 50;
  return options;
}

}  // namespace

Trainer::Trainer(CausalLM& model, TrainingArguments args, std::vector<Example> train_data, std::vector<Example> eval_data,
                 std::string base_model, TrainerCallbacks callbacks)
    : model_(&model),
      args_(std::move(args)),
      train_data_(std::move(train_data)),
      eval_data_(std::move(eval_data)),
      base_model_(std::move(base_model)),
      callbacks_(std::move(callbacks)),
      state_(model.arena(), optimizer_options(args_),
             scaler_options(device(), model.decoder().lm_head().scalar_type() == at::kHalf, args_)) {
  args_.validate();
  if (args_.optimizer_is_paged() && device().is_cpu()) {
    log_warning_once(message("[trainer] optim={}: on a CPU the optimizer state is not paged; results are the same.", args_.optim));
  }
  if (args_.tf32) at::globalContext().setAllowTF32CuBLAS(*args_.tf32);
  state_.schedule = make_schedule(args_.lr_scheduler_type, args_.lr_scheduler_kwargs.json);
  state_.base_learning_rate = args_.learning_rate;
  state_.max_grad_norm = args_.max_grad_norm;
  state_.count_position_zero = args_.count_position_zero;
  state_.seed = static_cast<uint64_t>(args_.seed);
  state_.base_fingerprint = base_fingerprint(*model_);
  set_up_model();
  unread_ = std::make_unique<UnreadLosses>();
  runner_ = std::make_unique<WindowRunner>(*model_, state_, args_, train_data_, !eval_data_.empty());
  if (!train_data_.empty()) {
    batches_per_epoch_ = batch_count(train_data_.size(), args_.per_device_train_batch_size, args_.dataloader_drop_last);
    QLORAPP_CHECK_VALUE(
        batches_per_epoch_ > 0,
        "[trainer] dataloader_drop_last leaves no batch of {} rows in batches of {}. Leave it out, or use a smaller batch.",
        train_data_.size(), args_.per_device_train_batch_size);
    count_steps();
  }
}

Trainer::~Trainer() = default;

void Trainer::set_up_model() {
  check_vocabulary(train_data_, "train_dataset", model_->config().vocab_size);
  check_vocabulary(eval_data_, "eval_dataset", model_->config().vocab_size);
  if (args_.packing) pack_rows(train_data_, args_, "train_dataset");
  if (args_.eval_packing.value_or(args_.packing)) pack_rows(eval_data_, args_, "eval_dataset");
  if (args_.full_determinism) model_->settings().set_deterministic(true);
  if (!args_.fp8) {
    model_->settings().set_float8(false);  // another run may have set it
  } else {
    const int64_t architecture = gpu_architecture(device());
    QLORAPP_CHECK_VALUE(architecture == 0 || architecture >= 89,
                        "[trainer] fp8=True needs a GPU that multiplies eight bits: sm_89 (L4, RTX 40), sm_90 (H100) or newer; "
                        "this one is sm_{}. Leave it out.",
                        architecture);
    model_->settings().set_float8(true);
  }
  const bool has_budget = !args_.memory_budget.empty();
  if (has_budget || args_.auto_find_batch_size) {
    FittedArguments fitted = fit_arguments(*model_, args_, longest_row(), !eval_data_.empty());
    args_ = std::move(fitted.args);
    log_info(fitted.text);
  }
  // What neither a budget nor the arguments decide stays as the model has it.
  StepSettings& settings = model_->settings();
  if (has_budget || args_.gradient_checkpointing) {
    settings.set_segments(parse_segments(args_.keep_text(), std::ssize(model_->blocks())));
  }
  if (has_budget || args_.memory() != MemorySettings{}) settings.set_memory(args_.memory());
  if (args_.embedding_on_host && model_->config().tie_word_embeddings) {
    log_warning_once(
        "[trainer] embedding_on_host has no effect: this model's head is its embedding table, and the head stays on the GPU.");
  }
}

int64_t Trainer::longest_row() const {
  if (train_data_.empty() && eval_data_.empty()) return args_.max_length;
  int64_t longest = 0;
  for (const auto* rows : {&train_data_, &eval_data_}) {
    for (const Example& row : *rows) longest = std::max(longest, static_cast<int64_t>(row.input_ids.size()));
  }
  return longest;
}

void Trainer::count_steps() {
  const int64_t window = args_.gradient_accumulation_steps, an_epoch = (batches_per_epoch_ + window - 1) / window;
  epochs_ =
      args_.max_steps > 0 ? (args_.max_steps + an_epoch - 1) / an_epoch : static_cast<int64_t>(std::ceil(args_.num_train_epochs));
  max_steps_ = count_training_steps(batches_per_epoch_, args_.gradient_accumulation_steps, args_.num_train_epochs, args_.max_steps);
  state_.schedule.warmup_steps = count_warmup_steps(args_.warmup_steps, args_.warmup_ratio, max_steps_);
  state_.schedule.training_steps = max_steps_;
}

double Trainer::epoch() const {
  if (batches_per_epoch_ == 0) return 0;
  return static_cast<double>(state_.cursor.epoch) +
         static_cast<double>(state_.cursor.batch) / static_cast<double>(batches_per_epoch_);
}

LogRecord Trainer::evaluate() {
  QLORAPP_CHECK_VALUE(!eval_data_.empty(), "[trainer] there are no evaluation data. Give eval_dataset (--eval_data).");
  LogRecord metrics = metrics_of_eval_data();
  log(metrics, false);
  metrics.set("epoch", epoch());
  control_.should_evaluate = false;
  if (callbacks_.on_evaluate) callbacks_.on_evaluate(metrics, control_);
  return metrics;
}

LogRecord Trainer::metrics_of_eval_data() {
  const auto begin = std::chrono::steady_clock::now();
  const int64_t size = args_.per_device_eval_batch_size;
  const auto after_each = [this] {
    if (callbacks_.poll) callbacks_.poll();
    event(TrainerEvent::kPredictionStep);
  };
  const EvalResult loss =
      qlorapp::evaluate(*model_, eval_data_, {size, /*exact_match=*/false, args_.logging_nan_inf_filter, after_each});
  const double seconds = seconds_since(begin);
  LogRecord metrics;
  metrics.set("eval_loss", loss.mean_of_batches);
  metrics.set("eval_loss_token_weighted", loss.token_weighted);
  metrics.set("eval_runtime", rounded(seconds, 4));
  metrics.set("eval_samples_per_second", rounded(static_cast<double>(eval_data_.size()) / seconds, 3));
  metrics.set("eval_steps_per_second", rounded(static_cast<double>(batch_count(eval_data_.size(), size, false)) / seconds, 3));
  if (args_.log_num_tokens) metrics.set("eval_num_tokens", state_.tokens_seen);
  return metrics;
}

void Trainer::write_trainer_state(const std::string& folder) const {
  qlorapp::write_trainer_state(folder, state_, args_, {epoch(), max_steps_, epochs_});
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
    const std::string best = format::path_in(args_.output_dir, message("checkpoint-{}", *state_.best_global_step));
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
    log_info(message("[trainer] loaded the adapters of {}, {} {}", best, args_.best_metric_name(), *state_.best_metric));
  }
  event(TrainerEvent::kTrainEnd);
}

void Trainer::restore(const std::string& folder) {
  QLORAPP_CHECK_FORMAT(format::exists(format::path_in(folder, "trainer_state.json")),
                       "[resume] {} is not a checkpoint: it has no trainer_state.json. Give a checkpoint-<step> folder.", folder);
  const bool of_transformers = format::exists(format::path_in(folder, "optimizer.pt"));
  QLORAPP_CHECK_FORMAT(
      format::exists(format::path_in(folder, "run_state.json")),
      "[resume] {} has no run_state.json: {}. Begin anew with its adapter, or resume from a whole checkpoint.", folder,
      of_transformers ? "it is a checkpoint of transformers' Trainer, whose optimizer.pt is a pickle file, which can run code"
                      : "it holds only the model (save_only_model)");
  if (!callbacks_.log_evaluate_save) {
    load_adapter(*model_, folder);
    read_trainer_history(folder, state_);
  }
  state_.load(folder);
  QLORAPP_CHECK_FORMAT(
      state_.cursor.batch <= batches_per_epoch_,
      "[resume] {} is at batch {} of its epoch, and an epoch of this run has {}. Give the data and batch size of that run.", folder,
      state_.cursor.batch, batches_per_epoch_);
  if (args_.ignore_data_skip && state_.cursor.batch < batches_per_epoch_) state_.cursor.batch = 0;
}

}  // namespace qlorapp
