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
#include <string>
#include <vector>

#include "qlorapp/data/dataset.hpp"
#include "qlorapp/nn/batch.hpp"
#include "qlorapp/nn/causal_lm.hpp"
#include "qlorapp/train/step_report.hpp"
#include "qlorapp/train/train_state.hpp"
#include "qlorapp/train/trainer_callbacks.hpp"
#include "qlorapp/train/training_arguments.hpp"
#include "train/graphed_steps.hpp"

namespace qlorapp {

class WindowRunner {
 public:
  /// What the caller of a step learns while it runs.
  struct Observer {
    std::function<void(TrainerEvent)> event;
    std::function<void()> poll;  ///< After each micro-batch; may be empty.
    /// With several ranks, between two micro-batches, at the same ones on each: may throw, on all ranks or on none.
    std::function<void()> meet = {};
  };

  /// All must outlive it. @param evaluates  the run has evaluation data, which plans count with.
  WindowRunner(CausalLM& model, TrainState& state, const TrainingArguments& args, const std::vector<Example>& rows, bool evaluates);

  /// One optimizer step. A window that ran out of memory is taken again, in smaller parts; the state is as before until a step is whole.
  /// With several ranks it is taken again only while no gradient has left this rank.
  /// @throws OutOfMemoryError if one row alone does not fit; whatever the observer throws.
  StepReport run(const Window& window, const Observer& observer);

  /// Forward and backward of the largest micro-batch that the rows can give, without an update: memory runs out here if it ever does.
  /// @throws OutOfMemoryError as run().
  void run_worst_case();

  /// Where the forward pass of a window stops being finite: a sentence (train/diagnosis.hpp).
  [[nodiscard]] std::string diagnosis(const Window& window);

  /// Frees the recorded steps of cuda_graphs.
  void clear_graphs();
  /// Micro-steps that ran as one graph each; none without cuda_graphs.
  [[nodiscard]] int64_t replayed() const { return graphs_ ? graphs_->replayed() : 0; }

 private:
  /// The rows of each part of each micro-batch of this rank.
  [[nodiscard]] std::vector<std::vector<std::vector<int64_t>>> parts_of(const Window& window) const;
  [[nodiscard]] std::vector<Batch> batches_of(const Window& window) const;
  [[nodiscard]] int64_t tokens_of(const std::vector<int64_t>& rows) const;
  [[nodiscard]] int64_t row_tokens(int64_t row) const { return std::ssize(rows_[static_cast<size_t>(row)].input_ids); }
  [[nodiscard]] int64_t longest_of(const Window& window) const;
  void refuse_if_sharded(const Window& window, const std::exception& error) const;
  /// After an allocation failed: gives cached memory back and lets micro-batches be taken in smaller parts.
  /// @param again  it failed before in this window.  @throws OutOfMemoryError if no part can be smaller.
  void make_room(const Window& window, const std::exception& error, bool again);

  CausalLM& model_;
  TrainState& state_;
  const TrainingArguments& args_;
  const std::vector<Example>& rows_;
  bool evaluates_;
  int64_t most_tokens_ = 0;               ///< Of a part of a micro-batch, once memory ran out; 0: micro-batches are taken whole.
  std::unique_ptr<GraphedSteps> graphs_;  ///< Where args.cuda_graphs asks for them.
};

}  // namespace qlorapp
