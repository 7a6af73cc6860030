// SPDX-License-Identifier: Apache-2.0
/// Runs the windows of a training run as optimizer steps: whole, or in parts once memory ran out.
///
/// A part of a micro-batch shares its place in the run with the others, so weights of tokens, dropout masks and the effective batch do not
/// change. Parts stay as small as they had to become. Of several ranks each computes its share of the window, and has parts of its own.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "qlorapp/nn/batch.hpp"
#include "qlorapp/nn/causal_lm.hpp"
#include "qlorapp/train/step.hpp"
#include "qlorapp/train/trainer_callbacks.hpp"
#include "qlorapp/train/training_arguments.hpp"
#include "train/graphed_steps.hpp"

namespace qlorapp {

class WindowRunner {
 public:
  /// Functions of the caller that a step calls while it runs. Each may be empty.
  struct Observer {
    std::function<void(TrainerEvent)> event;
    std::function<void()> poll;  ///< After each micro-batch.
    /// Between two micro-batches, at the same ones on each rank: may throw, on all ranks or on none.
    std::function<void()> meet = {};
  };

  /// All must outlive it. @param evaluates  the run has evaluation data, which plans count with.
  WindowRunner(CausalLM& model, TrainState& state, const TrainingArguments& args, bool evaluates);

  /// Makes a window: this rank's micro-batches, on the host; it may have none. Called again for each attempt.
  using MakeWindow = std::function<std::vector<Batch>()>;

  /// One optimizer step. A window that ran out of memory is taken again, in smaller parts; the state is as before until a step is whole.
  /// With several ranks it is taken again only while no gradient has left this rank.
  /// @param batches  micro-batches of all ranks.
  /// @throws OutOfMemoryError if one row alone does not fit; whatever the observer throws.
  StepReport run(const MakeWindow& window, int64_t batches, const Observer& observer);

  /// Its two halves, for a caller whose own code runs between them: the passes, and the update at this rate.
  WindowGradients gradients(const MakeWindow& window, int64_t batches, const Observer& observer);
  StepReport update(const WindowGradients& gradients, double rate, const Observer& observer);

  /// Forward and backward of the largest micro-batch that the rows can give, without an update: memory runs out here if it ever does.
  /// @throws OutOfMemoryError as run().
  void run_worst_case(const Batch& largest);

  /// Where the forward pass of a window stops being finite: a sentence (train/diagnosis.hpp).
  [[nodiscard]] std::string diagnosis(std::span<const Batch> window);

  /// Frees the recorded steps of cuda_graphs, and logs how many micro-steps ran as one graph each.
  void clear_graphs();

 private:
  /// The window on the model's device, each micro-batch in parts of at most most_tokens_.
  [[nodiscard]] std::vector<Batch> parts_of(std::span<const Batch> window, int64_t batches) const;
  /// Micro-batches that ranks compute at the same time count together, in as many `rows` as the first rank has.
  void sum_statistics(at::Tensor& table, int64_t rows) const;
  /// What was under way is dropped: a checkpoint of the state continues with the same bits, and so does the window if it is taken again.
  void abandon(uint32_t micro_step);
  void refuse_if_sharded(std::span<const Batch> window, const std::exception& error) const;
  /// After an allocation failed: releases recorded graphs and cached memory.
  void release_memory();
  /// Then: lets micro-batches be split into smaller parts.
  /// @param again  it failed before in this window.  @throws OutOfMemoryError if no part can be smaller.
  void make_room(std::span<const Batch> window, const std::exception& error, bool again);

  CausalLM& model_;
  TrainState& state_;
  const TrainingArguments& args_;
  bool evaluates_;
  int64_t most_tokens_ = 0;               ///< Of a part of a micro-batch, once memory ran out; 0: micro-batches are taken whole.
  std::unique_ptr<GraphedSteps> graphs_;  ///< Where args.cuda_graphs asks for them.
};

}  // namespace qlorapp
