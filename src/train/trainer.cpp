// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/train/trainer.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <numeric>

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "files/folder.hpp"
#include "files/folder_update.hpp"
#include "format/config_json.hpp"
#include "io/adapter_file.hpp"
#include "io/background_commit.hpp"
#include "io/checkpoint_folder.hpp"
#include "nn/decoder.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/data/collate.hpp"
#include "qlorapp/data/packing.hpp"
#include "qlorapp/format/model_config.hpp"
#include "qlorapp/io/adapter.hpp"
#include "qlorapp/io/device.hpp"
#include "qlorapp/train/evaluate.hpp"
#include "qlorapp/train/plan_run.hpp"
#include "speed.hpp"
#include "train/early_stopping.hpp"
#include "train/loss_trend.hpp"
#include "train/run_inputs.hpp"
#include "train/run_setup.hpp"
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

/// Without a tokenizer, which would have told, no token is known as white space.
int64_t ending_in_eos(const std::vector<Example>& rows, const std::vector<int64_t>& eos) {
  const std::vector<TokenId> ends(eos.begin(), eos.end());
  return std::count_if(rows.begin(), rows.end(),
                       [&](const Example& row) { return row.ends_in_eos ? *row.ends_in_eos : ends_in_trained_eos(row, ends, {}); });
}

void pack_rows(std::vector<Example>& rows, const TrainingArguments& args, const char* name) {
  if (rows.empty()) return;
  Packed packed = pack(rows, args.max_length, packing_strategy(args.packing_strategy));
  log_info(message("[packing] {}: {}", name, packed.line(args.max_length)));
  rows = std::move(packed.examples);
}

}  // namespace

Trainer::Trainer(CausalLM& model, TrainingArguments args, std::vector<Example> train_data, std::vector<Example> eval_data,
                 std::string base_model, TrainerCallbacks callbacks, std::shared_ptr<Communicator> ranks)
    : model_(&model),
      args_(std::move(args)),
      train_data_(std::move(train_data)),
      eval_data_(std::move(eval_data)),
      base_model_(std::move(base_model)),
      callbacks_(std::move(callbacks)),
      state_(new_state(model, args_)) {
  const std::shared_ptr<Communicator>& shard_ranks = model.decoder().ranks();
  if (shard_ranks) args_.base_sharding = sharding_over(shard_ranks.get());  // as it was loaded
  args_.validate();
  const std::shared_ptr<Communicator> all = ranks_of_base(model);
  state_.ranks = ranks ? std::move(ranks) : all ? all : single_process();
  QLORAPP_CHECK_VALUE(!shard_ranks || all == state_.ranks,
                      "[ranks] a sharded base is trained with the communicator that it was loaded with; got another one. Give "
                      "none, or that one: exchanges of two have no common order.");
  take_options(state_, args_);
  prepare_rows();
  set_up_model(*model_, args_, state_, longest_row(), !eval_data_.empty());
  state_.inputs = base_inputs(*model_);
  state_.inputs.train_data = data_fingerprint(train_data_);
  state_.inputs.eval_data = data_fingerprint(eval_data_);
  state_.inputs.ranks = rank_count();
  state_.inputs.lora_dropout = model_->lora_config().lora_dropout;
  unread_ = std::make_unique<UnreadLosses>();
  trend_ = std::make_unique<LossTrend>();
  saving_ = std::make_unique<BackgroundCommit>();
  runner_ = std::make_unique<WindowRunner>(*model_, state_, args_, !eval_data_.empty());
  if (!train_data_.empty()) {
    batches_per_epoch_ = batch_count(train_data_.size(), args_.per_device_train_batch_size, args_.dataloader_drop_last);
    QLORAPP_CHECK_VALUE(
        batches_per_epoch_ > 0,
        "[trainer] dataloader_drop_last leaves no batch of {} rows in batches of {}. Leave it out, or use a smaller batch.",
        train_data_.size(), args_.per_device_train_batch_size);
    QLORAPP_CHECK_VALUE(
        batches_per_epoch_ >= rank_count(),
        "[ranks] an epoch must have a micro-batch for each of {} ranks; {} rows in batches of {} are {}. Start fewer "
        "processes, or use a smaller --per_device_train_batch_size.",
        rank_count(), train_data_.size(), args_.per_device_train_batch_size, batches_per_epoch_);
    count_steps();
  }
  check_ranks();
}

void Trainer::check_ranks() {
  if (rank_count() == 1) return;
  Communicator& ranks = *state_.ranks;
  meet_ranks(ranks, *model_, args_);
  check_same_on_all(ranks, "base model (fingerprint)", message("{:016x}", state_.inputs.base));
  std::string fields;
  for (const auto& [name, value] : state_.inputs.base_config) fields += message("{} {}; ", name, value);
  check_same_on_all(ranks, "config.json of the base", fields);
  check_same_on_all(ranks, "training data (fingerprint)", message("{:016x}", state_.inputs.train_data));
  check_same_on_all(ranks, "evaluation data (fingerprint)", message("{:016x}", state_.inputs.eval_data));
}

Trainer::~Trainer() = default;

Bytes Trainer::planned_memory() const { return planned_peak(*model_, args_, longest_row(), !eval_data_.empty()); }

std::string Trainer::trend() const { return trend_line(*trend_, args_.learning_rate); }

void Trainer::prepare_rows() {
  check_vocabulary(train_data_, "train_dataset", model_->config().vocab_size);
  check_vocabulary(eval_data_, "eval_dataset", model_->config().vocab_size);
  rows_ = std::ssize(train_data_);
  rows_ending_in_eos_ = ending_in_eos(train_data_, model_->config().eos_token_ids);
  if (args_.packing) pack_rows(train_data_, args_, "train_dataset");
  if (args_.eval_packing.value_or(args_.packing)) pack_rows(eval_data_, args_, "eval_dataset");
}

int64_t Trainer::longest_row() const {
  if (train_data_.empty() && eval_data_.empty()) return args_.max_length;
  int64_t longest = 0;
  for (const auto* rows : {&train_data_, &eval_data_}) {
    for (const Example& row : *rows) longest = std::max(longest, static_cast<int64_t>(row.input_ids.size()));
  }
  return longest;
}

/// This rank's micro-batches of a window, on the host.
std::vector<Batch> Trainer::batches_of(const Window& window) const {
  std::vector<Batch> batches;
  for (auto batch = static_cast<size_t>(state_.ranks->rank()); batch < window.rows.size();
       batch += static_cast<size_t>(rank_count()))
    batches.push_back(collate(train_data_, window.rows[batch]));
  return batches;
}

Batch Trainer::largest_micro_batch() const {
  std::vector<int64_t> rows(train_data_.size());
  std::iota(rows.begin(), rows.end(), int64_t{0});
  const auto tokens = [&](int64_t row) { return train_data_[static_cast<size_t>(row)].input_ids.size(); };
  const size_t count = std::min(rows.size(), static_cast<size_t>(args_.per_device_train_batch_size));
  std::partial_sort(rows.begin(), rows.begin() + static_cast<std::ptrdiff_t>(count), rows.end(),
                    [&](int64_t a, int64_t b) { return tokens(a) > tokens(b); });
  rows.resize(count);
  return collate(train_data_, rows);
}

void Trainer::count_steps() {
  const int64_t window = args_.gradient_accumulation_steps * rank_count(), an_epoch = (batches_per_epoch_ + window - 1) / window;
  epochs_ =
      args_.max_steps > 0 ? (args_.max_steps + an_epoch - 1) / an_epoch : static_cast<int64_t>(std::ceil(args_.num_train_epochs));
  max_steps_ = count_training_steps(batches_per_epoch_, window, args_.num_train_epochs, args_.max_steps);
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
  if (callbacks_.measure) {
    callbacks_.measure(metrics, state_);
    poll();  // a signal may have cut it short
  }
  log(metrics, false);
  metrics.set("epoch", epoch());
  control_.should_evaluate = false;
  if (callbacks_.on_evaluate) callbacks_.on_evaluate(metrics, control_);
  if (is_training_ && args_.early_stopping_patience) stop_if_no_better(metrics);
  return metrics;
}

double Trainer::metric_of(const LogRecord& metrics) const {
  const std::string name = args_.best_metric_name();
  if (!metrics.contains(name)) {
    std::vector<std::string> there;
    for (const auto& [key, value] : metrics.values()) there.push_back(key);
    throw ValueError(
        message("[trainer] metric_for_best_model: an evaluation has no '{}'; it has {}. Name one of them.", name, joined(there)));
  }
  // Of rank 0, as a metric may be a time.
  return std::strtod(text_of_first(*state_.ranks, message("{:a}", metrics.number(name))).c_str(), nullptr);
}

void Trainer::stop_if_no_better(const LogRecord& metrics) {
  count_evaluation(args_, metric_of(metrics), state_);
  if (!stops_early(args_, state_)) return;
  control_.should_training_stop = true;
  log_info(message("[trainer] early stopping at step {}: {} did not improve in {} evaluations; the best is {:.4g}.",
                   state_.global_step, args_.best_metric_name(), state_.evaluations_without_gain, state_.best_metric.value_or(0)));
}

bool Trainer::note_best(const LogRecord& metrics) {
  const std::string name = args_.best_metric_name();
  if (name.empty()) return false;
  const double value = metric_of(metrics);
  const bool better =
      std::isfinite(value) &&
      (!state_.best_metric || (args_.best_is_greatest() ? value > *state_.best_metric : value < *state_.best_metric));
  if (!better) return false;
  state_.best_metric = value;
  if (args_.save_strategy != "no") state_.best_global_step = state_.global_step;
  return true;
}

LogRecord Trainer::metrics_of_eval_data() {
  const auto begin = std::chrono::steady_clock::now();
  const int64_t size = args_.per_device_eval_batch_size;
  const auto after_each = [this] {
    poll();
    event(TrainerEvent::kPredictionStep);
  };
  const EvalResult loss = qlorapp::evaluate(*model_, eval_data_,
                                            {.batch_size = size,
                                             .leave_out_nonfinite = args_.logging_nan_inf_filter,
                                             .after_each_batch = after_each,
                                             .ranks = state_.ranks.get()});
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
  qlorapp::write_trainer_state(folder, state_, args_, {.epoch = epoch(), .max_steps = max_steps_, .epochs = epochs_});
}

void Trainer::save_model(const std::string& folder) const {
  files::FolderUpdate update(folder, std::string(kAdapterConfig));
  save_adapter(*model_, update.staging(), base_model_);
  write_trainer_state(update.staging());
  if (text_ && !files::exists(files::path_in(folder, "config.json"))) {  // a model keeps its own
    text_->write(update.staging());
    for (const std::string& name : text_->others_in(folder)) update.retire(name);
  }
  update.commit();
}

void Trainer::save_state(const std::string& folder) {
  read_losses();
  const DataCursor here = state_.cursor;
  if (at_epoch_end_) state_.cursor = {here.epoch + 1, 0};  // what a resumed run has to do next
  state_.owes_epoch_end = !in_epoch_end_ && (is_complete() || stops_early(args_, state_));
  state_.save(folder);
  state_.cursor = here;
  write_arguments(folder, args_);
}

RunFolder& Trainer::run_folder() {
  QLORAPP_CHECK_VALUE(is_first(), "[ranks] rank 0 writes the files of a run; this is rank {}.", state_.ranks->rank());
  if (!folder_) folder_ = std::make_shared<RunFolder>(args_.output_dir);
  if (folder_->is_new()) origin_.empty() ? folder_->begin() : folder_->go_on_from(origin_, changed_);
  return *folder_;
}

void Trainer::save_checkpoint() {
  begin_save();
  finish_save();
}

void Trainer::begin_save() {
  finish_save();
  read_losses();
  const std::string path = files::path_in(args_.output_dir, message("checkpoint-{}", state_.global_step));
  if (is_first()) {
    write_checkpoint();
  } else if (state_.best_global_step == state_.global_step) {
    state_.best_model_checkpoint = path;
  }
  control_.should_save = false;
  saving_to_ = path;
}

void Trainer::write_checkpoint() {
  const auto writer = std::make_shared<CheckpointWriter>(run_folder(), state_.global_step);
  save_adapter(*model_, writer->folder(), base_model_);
  if (text_) text_->write(writer->folder());
  // A run that was stopped is to be resumed, whatever else is saved of it.
  args_.save_only_model && !stopped_ ? write_arguments(writer->folder(), args_) : save_state(writer->folder());
  if (state_.best_global_step) {
    const std::string best = files::path_in(args_.output_dir, message("checkpoint-{}", *state_.best_global_step));
    if (*state_.best_global_step == state_.global_step || folder_->owns(best)) state_.best_model_checkpoint = best;
  }
  write_trainer_state(writer->folder());
  saving_->start(folder_, writer, args_.save_total_limit, {state_.best_model_checkpoint});
}

void Trainer::finish_save() {
  if (saving_to_.empty()) return;
  const std::string path = std::exchange(saving_to_, {});
  const std::optional<std::string> news = saving_->wait();
  state_.ranks->barrier();  // each may read it now
  note_saved(path);
  tell_of_save(news);
}

void Trainer::tell_of_save(const std::optional<std::string>& path) {
  if (!path) return;
  note_saved(*path);
  if (callbacks_.on_save) callbacks_.on_save(*path, control_);
}

void Trainer::note_saved(const std::string& path) {
  origin_ = path;
  changed_ = false;
}

void Trainer::finish() {
  const std::string& best = state_.best_model_checkpoint;
  if (args_.load_best_model_at_end && !best.empty()) {
    load_adapter(*model_, best, model_->adapters().active_name());
    log_info(message("[trainer] loaded the adapters of {}, {} {}", best, args_.best_metric_name(), *state_.best_metric));
  }
  event(TrainerEvent::kTrainEnd);
}

void Trainer::restore(const std::string& folder) {
  QLORAPP_CHECK_FORMAT(files::exists(files::path_in(folder, "trainer_state.json")),
                       "[resume] {} is not a checkpoint: it has no trainer_state.json. Give a checkpoint-<step> folder.", folder);
  const bool of_transformers = files::exists(files::path_in(folder, "optimizer.pt"));
  QLORAPP_CHECK_FORMAT(
      files::exists(files::path_in(folder, "run_state.json")),
      "[resume] {} has no run_state.json: {}. Begin anew with its adapter, or resume from a whole checkpoint.", folder,
      of_transformers ? "it is a checkpoint of transformers' Trainer, whose optimizer.pt is a pickle file, which can run code"
                      : "it holds only the model (save_only_model)");
  check_checkpoint(folder);
  const bool compares_text = text_ && !TextFiles(folder).empty();
  const ChangedInputs changes =
      check_inputs(folder, args_, state_.inputs, compares_text ? text_->other_than(folder) : std::vector<std::string>());
  load_adapter(*model_, folder, model_->adapters().active_name());
  read_trainer_history(folder, state_);
  state_.load(folder);
  const int64_t batches_before = batch_count(train_data_.size(), changes.micro_batch_size, args_.dataloader_drop_last);
  state_.cursor.batch = state_.cursor.batch >= batches_before
                            ? batches_per_epoch_
                            : state_.cursor.batch * changes.micro_batch_size / args_.per_device_train_batch_size;
  origin_ = folder;
  changed_ = changes.any;
  if (args_.ignore_data_skip && state_.cursor.batch < batches_per_epoch_) state_.cursor.batch = 0;
  if (rank_count() > 1) {
    check_same_on_all(*state_.ranks, "checkpoint to resume from",
                      message("step {}, epoch {}, batch {}", state_.global_step, state_.cursor.epoch, state_.cursor.batch));
  }
}

LogRecord Trainer::summary(double seconds) const {
  const auto steps = static_cast<double>(state_.global_step - first_step_);
  const double rows =
      steps * static_cast<double>(args_.per_device_train_batch_size * args_.gradient_accumulation_steps * rank_count());
  LogRecord metrics;
  metrics.set("train_runtime", rounded(seconds, 4));
  metrics.set("train_samples_per_second", rounded(rows / seconds, 3));
  metrics.set("train_steps_per_second", rounded(steps / seconds, 3));
  if (args_.include_tokens_per_second) {
    metrics.set("train_tokens_per_second", rounded(static_cast<double>(state_.tokens_seen - first_tokens_) / seconds, 3));
  }
  metrics.set("total_flos", state_.total_flos);
  metrics.set("train_loss", state_.global_step > 0 ? state_.loss_sum / static_cast<double>(state_.global_step) : 0.0);
  return metrics;
}

}  // namespace qlorapp
