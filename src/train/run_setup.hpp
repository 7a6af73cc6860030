// SPDX-License-Identifier: Apache-2.0
/// Applies the options of a run to its state and to the model, before the first step.
#pragma once

#include <cstdint>
#include <memory>

#include "qlorapp/dist/communicator.hpp"
#include "qlorapp/nn/causal_lm.hpp"
#include "qlorapp/train/train_state.hpp"
#include "qlorapp/train/training_arguments.hpp"

namespace qlorapp {

/// A state at its beginning, with the optimizer and the loss scale of these options.
[[nodiscard]] TrainState new_state(CausalLM& model, const TrainingArguments& args);

/// Those that the model's base is divided over, or whose nodes it is divided over; null: it is whole.
[[nodiscard]] std::shared_ptr<Communicator> ranks_of_base(const CausalLM& model);

/// Before the first step of several ranks: what would make them compute different things is refused, and they begin with rank 0's adapter.
/// @throws ValueError on all ranks if versions, options, device types or adapters differ.
void meet_ranks(Communicator& ranks, CausalLM& model, const TrainingArguments& args);

/// The other options of a step: rate and schedule, clipping, seed, how targets and gradients are summed.
void take_options(TrainState& state, const TrainingArguments& args);

/// Sets determinism, fp8 and the memory settings of a budget or of the options. Settings that neither sets keep the model's values.
/// @param args         fields that a budget chooses are written; with several ranks, rank 0's choice.
/// @param longest_row  in tokens.  @param evaluates  the run has evaluation data, which plans count with.
/// @throws ValueError for fp8 on a GPU without it; OutOfMemoryError if nothing fits the budget.
void set_up_model(CausalLM& model, TrainingArguments& args, const TrainState& state, int64_t longest_row, bool evaluates);

}  // namespace qlorapp
