// SPDX-License-Identifier: Apache-2.0
/// What a run is told: of transformers' TrainingArguments, by name and meaning, what the loop and the command use, in one field table.
///
/// A name that is not here is an unknown option; the command answers transformers' other names by itself (cli/unused_options.hpp). Older
/// spellings (aliases) mean the same and are said once. Defaults are transformers' own; checkpoint_keep, the four memory options behind it
/// (nn/keep.hpp, nn/memory_settings.hpp) and count_position_zero are ours, max_length, completion_only_loss and packing's are TRL's
/// SFTConfig's.
///
/// The table is written in two parts, one a topic, which this struct puts together; a config that has these options and more
/// of its own derives from it and appends to fields() and aliases() in the same way.
///
/// Source: transformers 5.23, 4.57 and 4.46 TrainingArguments; TRL SFTConfig.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "qlorapp/core/field_table.hpp"
#include "qlorapp/nn/memory_settings.hpp"
#include "qlorapp/train/precision.hpp"
#include "qlorapp/train/training_arguments_logging.hpp"
#include "qlorapp/train/training_arguments_run.hpp"

namespace qlorapp {

struct TrainingArguments : RunArguments, LoggingArguments {
  static constexpr auto fields() { return FieldTable{RunArguments::fields(), LoggingArguments::fields()}; }
  static constexpr std::array<Alias, 6> aliases() {
    return {Alias{"evaluation_strategy", "eval_strategy", kOlder},
            Alias{"no_cuda", "use_cpu", kOlder},
            Alias{"max_seq_length", "max_length", kOlder},
            Alias{"per_gpu_train_batch_size", "per_device_train_batch_size", kOlder},
            Alias{"per_gpu_eval_batch_size", "per_device_eval_batch_size", kOlder},
            Alias{"activation_checkpointing", "gradient_checkpointing"}};
  }

  /// Looks at each value and at those that must fit together.
  /// @throws ValueError naming the first option that is wrong, what it may be and what it is.
  void validate() const;

  /// @pre validate() has passed.
  [[nodiscard]] Precision precision() const { return bf16 ? Precision::kBf16 : fp16 ? Precision::kFp16 : Precision::kFp32; }
  [[nodiscard]] bool optimizer_is_8bit() const { return optim.ends_with("_8bit"); }
  [[nodiscard]] bool optimizer_is_paged() const { return optim.starts_with("paged_"); }
  /// What parse_segments takes. "everything" without gradient_checkpointing.
  [[nodiscard]] std::string keep_text() const;
  [[nodiscard]] MemorySettings memory() const;
  [[nodiscard]] double eval_interval() const { return eval_steps.value_or(0) > 0 ? *eval_steps : logging_steps; }
  /// train_sampling_strategy, or what its older form says.
  [[nodiscard]] std::string sampling() const { return group_by_length ? "group_by_length" : train_sampling_strategy; }
  /// Are input tokens counted in the log?
  [[nodiscard]] bool counts_input_tokens() const;
  /// The metric that decides which evaluation is the best, with its "eval_"; empty: none does.
  [[nodiscard]] std::string best_metric_name() const;
  [[nodiscard]] bool best_is_greatest() const;
};

}  // namespace qlorapp
