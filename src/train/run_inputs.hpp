// SPDX-License-Identifier: Apache-2.0
/// What decides the numbers of a run: base, data and options. A resumed run is held to those of its checkpoint.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "qlorapp/data/dataset.hpp"
#include "qlorapp/nn/causal_lm.hpp"
#include "qlorapp/train/train_state.hpp"
#include "qlorapp/train/training_arguments.hpp"

namespace qlorapp {

/// 64 bits over tokens, labels, lengths and the order of rows. Not cryptographic. 0: no rows.
[[nodiscard]] uint64_t data_fingerprint(const std::vector<Example>& rows);

/// training_args.json of a checkpoint. @throws IoError.
void write_arguments(const std::string& folder, const TrainingArguments& args);

/// @throws IoError, FormatError: missing, or not of a run.
[[nodiscard]] TrainingArguments read_arguments(const std::string& folder);

/// The base's part of a run's inputs: fingerprints of the frozen weights, and the fields of config.json that enter the computation.
[[nodiscard]] RunInputs base_inputs(const CausalLM& model);

/// @throws FormatError if a checkpoint belongs to another base, naming the fields of config.json that differ. What differs in rounding
///         only, by the kind of device, is logged.
void check_base(const std::string& folder, const RunInputs& saved, const RunInputs& inputs);

struct ChangedInputs {
  bool any = false;              ///< Something that decides the numbers; args.resume_with_changes allowed it.
  int64_t micro_batch_size = 0;  ///< Of the run that wrote the checkpoint: its cursor counts in it.
};
/// Compares a run with the one that wrote a checkpoint, and logs what differs.
/// @throws FormatError for another base model; for other data and for options that affect the results unless args.resume_with_changes,
///         naming each with its old and new value.
/// @param other_text  files of tokenizer and template that differ from the checkpoint's. They decide the numbers through the rows alone.
ChangedInputs check_inputs(const std::string& folder, const TrainingArguments& args, const RunInputs& inputs,
                           const std::vector<std::string>& other_text = {});

}  // namespace qlorapp
