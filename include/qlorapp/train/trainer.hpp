// SPDX-License-Identifier: Apache-2.0
/// Epochs, logging, evaluation and saving around train_step. No device code, no numerics of its own.
///
/// Semantics are transformers' Trainer's (trainer_callbacks.hpp for the events): batches of per_device_train_batch_size rows in
/// a seeded order, windows of gradient_accumulation_steps batches (the last of an epoch may be short), learning rate by
/// optimizer step, global_step counting skipped fp16 steps too, log_history with the same keys. A resumed run continues with
/// the same bits on the CPU.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "qlorapp/core/error.hpp"
#include "qlorapp/core/units.hpp"
#include "qlorapp/data/dataset.hpp"
#include "qlorapp/dist/communicator.hpp"
#include "qlorapp/io/text_files.hpp"
#include "qlorapp/nn/causal_lm.hpp"
#include "qlorapp/train/log_history.hpp"
#include "qlorapp/train/step_report.hpp"
#include "qlorapp/train/train_state.hpp"
#include "qlorapp/train/trainer_callbacks.hpp"
#include "qlorapp/train/training_arguments.hpp"

namespace qlorapp {

class BackgroundCommit;
class LossTrend;
class RunFolder;
class UnreadLosses;
class WindowRunner;

struct TrainOutput {
  int64_t global_step = 0;
  double training_loss = 0;  ///< Mean of the steps' losses, over all steps of the run, resumed ones included.
  LogRecord metrics;         ///< train_runtime, train_samples_per_second, train_steps_per_second, total_flos, train_loss, epoch.
  bool stopped = false;      ///< TrainerCallbacks::stop_now ended the run.
};

class Trainer {
 public:
  /// @param model       with adapters. It and the data must outlive the trainer.
  /// @param train_data  may be empty for a trainer that only evaluates.
  /// @param base_model  named in adapter_config.json.
  /// @param ranks       that train together, each with the same arguments and data; null: one process. Each step has
  ///                    gradient_accumulation_steps micro-batches of each rank. Rank 0 writes all files, and has the callbacks.
  /// With args.packing the rows are packed here (data/packing.hpp).
  /// @throws ValueError if an argument is out of range, or a token is outside the vocabulary; on every rank if arguments, data, base or
  ///         version of the ranks differ.
  Trainer(CausalLM& model, TrainingArguments args, std::vector<Example> train_data, std::vector<Example> eval_data,
          std::string base_model, TrainerCallbacks callbacks = {}, std::shared_ptr<Communicator> ranks = nullptr);
  ~Trainer();

  /// Writes into args.output_dir as the only run: the folder is locked until train() returns, unless nothing is to be saved. However it
  /// ends, run_report.json is left there (docs/formats/run_report.md).
  /// @param resume_from  a checkpoint folder, or empty to begin anew.
  /// @throws ValueError without data; FormatError if the checkpoint is damaged, or is of another base model, or of other data and options
  ///         than these (args.resume_with_changes allows those); IoError if another run writes into the folder;
  ///         TrainingDiverged if gradients are not finite: on a GPU that is noticed when losses are next read, at the latest before
  ///         a log entry, a checkpoint and the end.
  TrainOutput train(const std::optional<std::string>& resume_from = std::nullopt);

  /// eval_loss (mean over rows of their batch's mean loss, as transformers), eval_loss_token_weighted, eval_runtime,
  /// eval_samples_per_second, eval_steps_per_second of eval_data; logged and reported.
  LogRecord evaluate();

  /// Adapter files into `folder`, and trainer_state.json beside them: all of them or, after a crash, none.
  void save_model(const std::string& folder) const;
  /// `output_dir/checkpoint-<global_step>`, whole or not at all; prunes to save_total_limit. Returns when it is on the disk; train() itself
  /// goes on while a thread flushes, and waits before the next one and at its end.
  void save_checkpoint();
  /// trainer_state.json alone.
  void write_trainer_state(const std::string& folder) const;
  /// Checkpoints go through this folder, which the caller has locked.
  void use_folder(std::shared_ptr<RunFolder> folder) { folder_ = std::move(folder); }
  /// What the rows were made with: written beside every adapter, and compared with a checkpoint's on resume.
  void use_text(TextFiles text) { text_ = std::move(text); }

  [[nodiscard]] const TrainState& state() const { return state_; }
  [[nodiscard]] TrainState& state() { return state_; }
  [[nodiscard]] const TrainingArguments& args() const { return args_; }
  /// As they are evaluated: packed if the arguments ask for it.
  [[nodiscard]] const std::vector<Example>& eval_data() const { return eval_data_; }
  [[nodiscard]] int64_t max_steps() const { return max_steps_; }
  [[nodiscard]] int64_t epochs() const { return epochs_; }
  /// Whole epochs and the share of the one under way.
  [[nodiscard]] double epoch() const;
  /// The last step as a log entry: its own loss, grad_norm, learning_rate, epoch and step. It is not put into the history. Before the first
  /// step the loss is NaN. Reads the losses that are due: on a GPU that synchronizes. @throws TrainingDiverged as train().
  [[nodiscard]] LogRecord last_step();
  /// The peak that was planned: of the GPU's memory, or on a CPU of weights and steps.
  [[nodiscard]] Bytes planned_memory() const;
  /// A line with what to try if the loss of the last train() did not fall; empty if it fell or the run was too short to tell
  /// (src/train/loss_trend.hpp has the rule).
  [[nodiscard]] std::string trend() const;

 private:
  class Owed;
  /// The part of a checkpoint that train(resume_from) needs beside the adapter: optimizer, scaler, cursor, counters.
  void save_state(const std::string& folder);
  void prepare_rows();
  void check_ranks();
  [[nodiscard]] int64_t rank_count() const { return state_.ranks->size(); }
  [[nodiscard]] bool is_first() const { return state_.ranks->is_first(); }
  /// With several ranks: all take the flags of rank 0, which has the callbacks, and stop together.
  void agree();
  void count_steps();
  [[nodiscard]] at::Device device() const { return model_->device(); }
  /// Tokens of the longest: with a batch of such rows a run is as full as it will ever be. max_length where rows come from elsewhere.
  [[nodiscard]] int64_t longest_row() const;
  [[nodiscard]] Window next_window(const std::vector<int64_t>& order) const;
  [[nodiscard]] std::vector<Batch> batches_of(const Window& window) const;
  [[nodiscard]] Batch largest_micro_batch() const;
  void run_epoch();
  void end_epoch();
  void run_step(const Window& window);
  void event(TrainerEvent event);
  void flow_at_step_end();
  void flow_at_epoch_end();
  void count_step(const StepReport& report);
  void log_evaluate_save();
  void run_evaluation();
  bool note_best(const LogRecord& metrics);
  /// The value of metric_for_best_model, the same on all ranks. @throws ValueError if there is none.
  [[nodiscard]] double metric_of(const LogRecord& metrics) const;
  void stop_if_no_better(const LogRecord& metrics);
  void finish();
  void read_losses();
  TrainOutput run(const std::optional<std::string>& resume_from);
  void report(const std::string& outcome, const std::string& error) const;
  void run_epochs();
  /// The last step is behind us. A run that was rolled back has left rows out, and ends with its rows.
  [[nodiscard]] bool is_complete() const;
  bool roll_back(const Error& reason);
  [[nodiscard]] LogRecord metrics_of_eval_data();
  void log(LogRecord record, bool training);
  void restore(const std::string& folder);
  RunFolder& run_folder();
  /// Writes a checkpoint's files; a thread commits them.
  void begin_save();
  void write_checkpoint();
  /// Waits for the checkpoint under way, if there is one: then it can be read on every rank.
  void finish_save();
  /// @param path  a checkpoint that has become whole; none: nothing happens.
  void tell_of_save(const std::optional<std::string>& path);
  void note_saved(const std::string& path);
  void poll();
  /// Ends the run on all ranks where one of them is asked to stop.
  void stop_if_asked();
  void stop();
  [[nodiscard]] LogRecord summary(double seconds) const;

  CausalLM* model_;
  TrainingArguments args_;
  std::vector<Example> train_data_, eval_data_;
  std::string base_model_;
  std::optional<TextFiles> text_;  ///< Unset: the program's own matter.
  TrainerCallbacks callbacks_;
  int64_t batches_per_epoch_ = 0, max_steps_ = 0, epochs_ = 0;
  TrainState state_;
  TrainerControl control_;
  double started_ = 0;                         ///< train() began, in seconds since the epoch.
  int64_t first_tokens_ = 0, first_step_ = 0;  ///< When train() began.
  bool at_epoch_end_ = false;                  ///< The epoch's last step is behind us and its end is under way.
  bool in_epoch_end_ = false;                  ///< The flow of an epoch's end has begun, which may come before its last step.
  std::string saving_to_;                      ///< The checkpoint that the first rank commits, for all ranks; empty: none.
  bool is_training_ = false, stopped_ = false, changed_ = false, resumed_with_changes_ = false;
  int64_t rows_ = 0, rows_ending_in_eos_ = 0;  ///< Of train_data, before they are packed.
  std::string resumed_from_;                   ///< By train(); empty: nothing.
  std::string origin_;                         ///< Checkpoint that the run goes on from, or its own last one; empty: it began here.
  std::shared_ptr<RunFolder> folder_;          ///< Locked; null while nothing is written.
  std::unique_ptr<WindowRunner> runner_;       ///< Makes steps of windows (src/train/window_runner.hpp).
  std::unique_ptr<BackgroundCommit> saving_;   ///< Waited for before the folder is given up.
  std::unique_ptr<LossTrend> trend_;           ///< Of the losses of this train().
  std::unique_ptr<UnreadLosses> unread_;       ///< Losses that are still on the device.
};

}  // namespace qlorapp
