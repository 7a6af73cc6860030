// SPDX-License-Identifier: Apache-2.0
/// The base against the adapter, at the end of a run: held-out loss, answers to held-out rows (answer_rows.hpp), and the loss on a text that has
/// nothing to do with the training, which rises where the adapter makes the model forget.
///
/// The base is the same model with its adapters switched off, so it needs no second copy.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "qlorapp/json/json.hpp"
#include "qlorapp/train/answer_rows.hpp"
#include "qlorapp/train/evaluate.hpp"

namespace qlorapp {

/// A short text in plain English, written for this library.
[[nodiscard]] std::string_view neutral_text();

/// What was not measured is unset.
struct RunScore {
  std::optional<double> eval_loss;                ///< EvalResult::mean_of_batches of the held-out rows.
  std::optional<double> neutral_loss;             ///< Mean over the tokens of neutral_text().
  std::optional<int64_t> exact_matches, stopped;  ///< Of the answers.
};

struct Comparison {
  int64_t eval_rows = 0, answers = 0, neutral_tokens = 0;  ///< Measured on.
  /// Unset where switching the adapter off does not give the base: its initialization took a part out of it (PiSSA, OLoRA, LoftQ).
  std::optional<RunScore> base;
  RunScore adapter;

  [[nodiscard]] bool is_empty() const { return eval_rows == 0 && answers == 0 && neutral_tokens == 0; }
  /// As in run_report.json (docs/formats/run_report.md).
  [[nodiscard]] format::Json to_json() const;
  /// Lines for a terminal, without what was not measured.
  [[nodiscard]] std::vector<std::string> table() const;
};

struct CompareOptions {
  EvalOptions eval;
  std::vector<HeldOutQuestion> questions;
  AnswerOptions answers;
  std::vector<TokenId> neutral_ids;  ///< Tokens of neutral_text(); fewer than two: there is no tokenizer.
  RunScore known = {};               ///< Of the adapter, from the last evaluation: not measured again.
};

/// @param eval_rows  may be empty.
/// @returns nothing if answers.stop_now() ended it.  @throws ValueError without adapters, or with base_sharding, whose ranks would have to
/// take part in the same order; what evaluate() and generate() throw. The adapters are in use again, whatever happens. Synchronizes.
[[nodiscard]] std::optional<Comparison> compare_with_base(CausalLM& model, const std::vector<Example>& eval_rows,
                                                          const CompareOptions& options);

}  // namespace qlorapp
