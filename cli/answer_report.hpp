// SPDX-License-Identifier: Apache-2.0
/// Answers to held-out rows in a run (--eval_generate), and the table of base and adapter at its end.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "folder_text.hpp"
#include "qlorapp/train/answer_rows.hpp"
#include "qlorapp/train/comparison.hpp"
#include "qlorapp/train/trainer.hpp"
#include "train/answer_file.hpp"

namespace qlorapp::cli {

/// Nothing of it ends a run: what fails is left out with a warning.
class AnswerReport {
 public:
  /// @param eval_rows  before packing; may be empty. They, the model and the tools must outlive it.
  /// @param writes     whether this process writes the run's files.
  /// @param is_alone   whether it is the only process: several answer all rows, and none may stop before the others.
  AnswerReport(CausalLM& model, FolderText& tools, const std::vector<Example>& eval_rows, bool writes, bool is_alone)
      : model_(model), tools_(tools), eval_rows_(eval_rows), writes_(writes), is_alone_(is_alone) {}

  /// Answers at each evaluation, if args.eval_generate asks for them.
  /// @param resumes  whether the run goes on from a checkpoint.
  void add_to(TrainerCallbacks& callbacks, const TrainingArguments& args, bool resumes);
  /// For the trainer of these callbacks, before it trains.
  void watch(const Trainer& trainer) { trainer_ = &trainer; }
  /// The table's lines, which are also written into the run's folder. After the adapter is saved.
  [[nodiscard]] std::vector<std::string> compare();

 private:
  void begin(const std::string& folder, std::optional<int64_t> resumed_at);
  void answer(LogRecord& metrics, const TrainState& state);
  RunScore& last_of(int64_t step);
  [[nodiscard]] AnswerOptions options() const;
  /// Scores of the last evaluation; empty if the adapter has changed since then.
  [[nodiscard]] RunScore known() const;
  [[nodiscard]] std::vector<HeldOutQuestion> questions(int64_t count, const AnswerOptions& options) const;

  CausalLM& model_;
  FolderText& tools_;
  const std::vector<Example>& eval_rows_;
  const Trainer* trainer_ = nullptr;
  std::optional<AnswerFile> file_;
  RunScore last_;  ///< Of the evaluation at last_step_.
  int64_t last_step_ = -1;
  bool writes_, is_alone_, has_said_ = false;
};

}  // namespace qlorapp::cli
