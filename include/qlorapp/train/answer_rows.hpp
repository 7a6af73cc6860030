// SPDX-License-Identifier: Apache-2.0
/// Answers to held-out rows: what an adapter has learned, beside its loss.
///
/// A row is asked by its labels. Its prompt is what stands before the first trained token; the expected answer is the trained tokens that
/// follow, up to the first that ends a generation. A row that is trained from its first token on has no prompt, and cannot be asked.
///
/// Answers are greedy, so those of two evaluations differ only by what was learned between them. Nothing of a run changes: no random number is
/// drawn, no parameter is written.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "qlorapp/data/dataset.hpp"
#include "qlorapp/nn/causal_lm.hpp"

namespace qlorapp {

struct HeldOutQuestion {
  int64_t row = 0;  ///< Its number among the rows, from 0.
  std::vector<int64_t> prompt;
  std::vector<int64_t> expected;  ///< Without the token that ends it.
};

struct AnswerOptions {
  int64_t max_new_tokens = 128;        ///< >= 1. A longer answer is cut, and does not match.
  std::vector<int64_t> eos_token_ids;  ///< Any of them ends an answer.
  /// The text of tokens. Empty: there is no tokenizer; answers are compared token by token.
  std::function<std::string(std::span<const TokenId> ids, bool skip_special_tokens)> decode;
  int64_t max_rows = 8;            ///< Computed at once, at most, >= 1.
  std::function<bool()> stop_now;  ///< Asked after each token; true ends the generation. May be empty.
};

struct RowAnswer {
  int64_t row = 0;
  std::string prompt, answer,
      expected;              ///< Texts, the last two without special tokens; without a tokenizer JSON lists of token ids.
  bool exact_match = false;  ///< answer and expected are equal without the white space at their ends.
  bool stopped = false;      ///< Ended by itself, before max_new_tokens.
};

struct Answers {
  std::vector<RowAnswer> rows;

  [[nodiscard]] int64_t exact_matches() const;
  [[nodiscard]] int64_t stopped() const;
  /// The lines of eval_answers.jsonl (docs/formats/run_report.md).
  /// @param data  names the rows if there are several sets of them; empty: there is one.
  [[nodiscard]] std::string lines(int64_t step, const std::string& data = "") const;
};

/// @param count      of questions, at most.
/// @param ends       tokens that end an answer.
/// @param positions  of the model: longer prompts are passed over.
/// @returns evenly spaced ones of the rows that can be asked, in their order. Of a pack the first row is looked at.
[[nodiscard]] std::vector<HeldOutQuestion> choose_questions(const std::vector<Example>& rows, int64_t count,
                                                            std::span<const int64_t> ends, int64_t positions);

/// @param generated  of each question: its new tokens, with the one that ended them.
[[nodiscard]] Answers judge_answers(const std::vector<HeldOutQuestion>& questions,
                                    const std::vector<std::vector<int64_t>>& generated, const AnswerOptions& options);

/// Generates and judges. The keys and values of rows that are computed at once have at most 256 MiB, or what one row needs.
/// @returns nothing if stop_now() ended it. @throws ValueError as generate(). Synchronizes once a pass of one token per row.
[[nodiscard]] std::optional<Answers> answer_rows(CausalLM& model, const std::vector<HeldOutQuestion>& questions,
                                                 const AnswerOptions& options);

}  // namespace qlorapp
