// SPDX-License-Identifier: Apache-2.0
/// What the options of a run do before its first step: to its state, and to the model.
#pragma once

#include <cstdint>

#include "qlorapp/nn/causal_lm.hpp"
#include "qlorapp/train/train_state.hpp"
#include "qlorapp/train/training_arguments.hpp"

namespace qlorapp {

/// A state at its beginning, with the optimizer and the loss scale of these options.
[[nodiscard]] TrainState new_state(CausalLM& model, const TrainingArguments& args);

/// The other options of a step: rate and schedule, clipping, seed, how targets and gradients are summed.
void take_options(TrainState& state, const TrainingArguments& args);

/// Determinism, fp8, and what a memory budget or the options say of memory. What neither decides stays as the model has it.
/// @param args         those that a budget decides are set, to rank 0's where state.ranks are several.
/// @param longest_row  in tokens.  @param evaluates  the run has evaluation data, which plans count with.
/// @throws ValueError for fp8 on a GPU without it; OutOfMemoryError if nothing fits the budget.
void set_up_model(CausalLM& model, TrainingArguments& args, const TrainState& state, int64_t longest_row, bool evaluates);

}  // namespace qlorapp
