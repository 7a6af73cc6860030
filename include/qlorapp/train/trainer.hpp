// SPDX-License-Identifier: Apache-2.0
/// Epochs, logging, evaluation and saving around train_step. No device code, no numerics of its own.
///
/// Semantics are transformers' Trainer's: batches of per_device_train_batch_size rows in a seeded order, windows of
/// gradient_accumulation_steps batches (the last of an epoch may be short), learning rate by optimizer step, global_step counting
/// skipped fp16 steps too, log_history with the same keys. A resumed run continues with the same bits on the CPU.
#pragma once

#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "qlorapp/data/dataset.hpp"
#include "qlorapp/nn/causal_lm.hpp"
#include "qlorapp/train/log_history.hpp"
#include "qlorapp/train/train_state.hpp"
#include "qlorapp/train/training_arguments.hpp"

namespace qlorapp {

struct StepReport;  // train/step.hpp

/// What a callback may ask for; read after each call.
struct TrainerControl {
  bool should_training_stop = false;
  bool should_save = false;
  bool should_evaluate = false;
  bool should_log = false;
};

/// Called on the training thread. Any may be empty; what they throw ends the training and reaches the caller of train().
struct TrainerCallbacks {
  std::function<void(const LogRecord& record, TrainerControl& control)> on_log;
  std::function<void(int64_t step, int64_t max_steps, TrainerControl& control)> on_step_end;
  std::function<void(const LogRecord& metrics, TrainerControl& control)> on_evaluate;
  std::function<void(const std::string& folder)> on_save;
  /// Between micro-batches: the place to look for signals.
  std::function<void()> on_substep_end;
};

struct TrainOutput {
  int64_t global_step = 0;
  double training_loss = 0;  ///< Mean of the steps' losses, over all steps of the run, resumed ones included.
  LogRecord metrics;         ///< train_runtime, train_samples_per_second, train_steps_per_second, total_flos, train_loss, epoch.
};

/// Gradients that are not finite, without a scaler whose business they were. Python: RuntimeError.
class TrainingDiverged : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Trainer {
 public:
  /// @param model       with adapters. It and the data must outlive the trainer.
  /// @param base_model  named in adapter_config.json.
  /// @throws ValueError if an argument is out of range, the data are empty, or a token is outside the vocabulary.
  Trainer(CausalLM& model, TrainingArguments args, std::vector<Example> train_data, std::vector<Example> eval_data,
          std::string base_model, TrainerCallbacks callbacks = {});

  /// @param resume_from  a checkpoint folder, or empty to begin anew.
  /// @throws FormatError if the checkpoint does not belong to this model, data and arguments. TrainingDiverged if gradients are
  /// not
  ///         finite; on a GPU that is noticed when losses are next read: at the latest before a log entry, a checkpoint and the
  ///         end.
  TrainOutput train(const std::optional<std::string>& resume_from = std::nullopt);

  /// eval_loss (mean over rows of their batch's mean loss, as transformers), eval_loss_token_weighted, eval_runtime,
  /// eval_samples_per_second, eval_steps_per_second, epoch.
  LogRecord evaluate();

  /// Adapter files into `folder`, and trainer_state.json beside them.
  void save_model(const std::string& folder) const;
  /// output_dir/checkpoint-<global_step>, whole or not at all; prunes to save_total_limit.
  void save_checkpoint();

  [[nodiscard]] const TrainState& state() const { return state_; }
  [[nodiscard]] const TrainingArguments& args() const { return args_; }
  [[nodiscard]] int64_t max_steps() const { return max_steps_; }

 private:
  std::vector<Batch> next_window(const std::vector<int64_t>& order, int64_t first_batch) const;
  void after_step(const StepReport& report);
  void read_losses();
  void log(LogRecord record);
  [[nodiscard]] double epoch() const;
  void write_trainer_state(const std::string& folder) const;
  void restore(const std::string& folder);
  [[nodiscard]] LogRecord summary(double seconds, int64_t first_step) const;

  CausalLM& model_;
  TrainingArguments args_;
  std::vector<Example> train_data_, eval_data_;
  std::string base_model_;
  TrainerCallbacks callbacks_;
  int64_t batches_per_epoch_ = 0, steps_per_epoch_ = 0, max_steps_ = 0;
  TrainState state_;
  TrainerControl control_;
  bool said_diverged_ = false;
  struct Unread {
    at::Tensor loss, grad_norm;  ///< The norm is undefined where a scaler has skipped the step.
    int64_t step;
  };
  std::vector<Unread> unread_;  ///< Steps since the last look: a GPU need not wait for the host to read each.
};

}  // namespace qlorapp
