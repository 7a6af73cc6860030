// SPDX-License-Identifier: Apache-2.0
/// All that a resumed run needs, in one struct. What is not here does not survive a resume.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "qlorapp/adapters/adapter_arena.hpp"
#include "qlorapp/dist/communicator.hpp"
#include "qlorapp/train/grad_scaler.hpp"
#include "qlorapp/train/log_history.hpp"
#include "qlorapp/train/optimizer.hpp"
#include "qlorapp/train/schedule.hpp"

namespace qlorapp {

/// Where the run stands in its data. The order of an epoch is a function of seed and epoch; no generator state is needed.
struct DataCursor {
  int64_t epoch = 0;  ///< Whole epochs behind us.
  int64_t batch = 0;  ///< Micro-batches consumed of this one, by all ranks.
};

/// Fingerprints of a run's base, data and options; 0: none.
struct RunInputs {
  uint64_t train_data = 0, eval_data = 0;  ///< Of the rows and their order.
  uint64_t base = 0;                       ///< Of the frozen weights.
  uint64_t base_without_scales = 0;        ///< The scales of four-bit weights left out, which may depend on the kind of device.
  /// Fields of the base's config.json that enter the computation, as JSON. Empty in checkpoints of older versions.
  std::vector<std::pair<std::string, std::string>> base_config;
  std::string device;  ///< "cpu", "cuda".
  int64_t ranks = 1;   ///< Processes that trained together.
  double lora_dropout = 0;

  /// @param folder  a checkpoint.  @throws FormatError naming file and key.
  [[nodiscard]] static RunInputs load(const std::string& folder);
};

struct TrainState {
  /// A run at its beginning. The arena must outlive it.
  TrainState(AdapterArena& of, const AdamW::Options& optimizer_options, const GradScaler::Options& scaler_options)
      : arena(&of), optimizer(of, optimizer_options), scaler(scaler_options) {}

  AdapterArena* arena;                  ///< Values and gradients; owned by the model.
  std::shared_ptr<Communicator> ranks;  ///< Null: one process.
  bool sums_in_bf16 = false;            ///< Gradients of several ranks are summed in bfloat16.
  AdamW optimizer;
  GradScaler scaler;
  Schedule schedule;
  double base_learning_rate = 0;
  double max_grad_norm = 0;          ///< 0 does not clip.
  bool count_position_zero = false;  ///< Accumulator's switch for older transformers' count.
  uint64_t seed = 0;                 ///< Of dropout masks and data order.
  uint32_t micro_step = 0;           ///< Micro-batches of all ranks since the start of the run; part of the key of dropout masks.
  int64_t global_step = 0;           ///< Optimizer steps, skipped ones included.
  DataCursor cursor;
  int64_t tokens_seen = 0;     ///< Input tokens.
  int64_t skipped_steps = 0;   ///< Steps whose gradients were not finite, and that changed nothing.
  int64_t skips_in_a_row = 0;  ///< Steps left out since the last whole one, without a loss scale, which has its own count.
  int64_t rollbacks = 0;       ///< Returns to a checkpoint after such a step (TrainingArguments::on_non_finite).
  double loss_sum = 0;         ///< Of the mean losses of all steps; for train_loss.
  double loss_since_log = 0;   ///< The same since the last log entry.
  int64_t steps_since_log = 0;
  double last_loss = std::numeric_limits<double>::quiet_NaN();  ///< Of the last whole step.
  LogHistory log_history;
  double last_grad_norm = 0, last_learning_rate = 0;  ///< Of the last step, for a log entry that an epoch's end still owes.
  double total_flos = 0;  ///< 6 · input tokens · parameters without embeddings, as transformers estimates it.
  std::optional<double> best_metric;
  std::optional<int64_t> best_global_step;
  std::string best_model_checkpoint;     ///< Folder; empty: none.
  int64_t evaluations_without_gain = 0;  ///< In a row; what early_stopping_patience bounds. Kept in trainer_state.json.
  RunInputs inputs;
  /// Logging, evaluation and saving still due when the run was stopped: a resumed run begins with them.
  bool owes_log = false, owes_evaluation = false, owes_save = false;
  bool owes_epoch_end = false;  ///< Behind the last step, with the end of its epoch still to come.

  /// optimizer.safetensors, scaler.json (with fp16) and run_state.json into a folder. Whole files or none.
  void save(const std::string& folder) const;
  /// All but `inputs`. @throws FormatError naming file and key: something is missing, or of another size.
  void load(const std::string& folder);
};

}  // namespace qlorapp
