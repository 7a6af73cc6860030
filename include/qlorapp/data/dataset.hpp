// SPDX-License-Identifier: Apache-2.0
/// Training rows: a .jsonl file or a .json array becomes token ids and labels. Torch-free.
///
/// The first row decides the format and every row is held to it:
///   {"input_ids": […], "labels": […]?}                        already tokens; labels default to the tokens
///   {"messages": [{"role", "content"}, …], "tools": […]?}     rendered by a chat template; tool_calls too
///   {"prompt": "…", "completion": "…"}                        one text; EOS is appended when missing
///   {"text": "…"}                                             one text; EOS is appended when missing
/// Labels are the ids, or -100 where nothing is to be learnt. They are not shifted: position i + 1 is what i predicts, so a
/// label at position 0 is never scored. Rows are cut at max_length (the start is kept) and then left out when no label remains.
/// Semantics: TRL's SFTTrainer, but for tokens across a boundary (see DatasetSummary::straddling).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "qlorapp/data/chat_template.hpp"
#include "qlorapp/data/tokenizer.hpp"

namespace qlorapp {

class TextTools;

/// One row, ready to be trained on.
struct Example {
  static constexpr TokenId kIgnored = -100;
  std::vector<TokenId> input_ids;
  std::vector<TokenId> labels;  ///< As long as input_ids; an id or kIgnored.
  int64_t line = 0;             ///< Where the row starts in its file, from 1.
  /// Of a pack (data/packing.hpp): the lengths of its rows, in order. Empty: one row.
  std::vector<int64_t> row_lengths = {};
};

struct DatasetOptions {
  int64_t max_length = 1024;                 ///< Tokens a row may have; 0: no limit.
  std::optional<bool> completion_only_loss;  ///< Prompts get no loss. Unset: true for prompt/completion, false for messages.
  bool assistant_only_loss = false;          ///< Messages: only assistants' turns get loss, their end-of-turn token included.
  bool append_eos = true;                    ///< Text and completions end with EOS.
  std::string text_field = "text";           ///< The key of {"text"} rows.
  int64_t model_vocab_size = 0;              ///< Ids must be below; 0: below the tokenizer's own limit.
  std::optional<std::string> date_string;    ///< See ChatOptions.
};

enum class RowFormat { kInputIds, kMessages, kPromptCompletion, kText };
[[nodiscard]] std::string_view to_string(RowFormat format);

/// What was read, for people: nothing here is needed to train.
struct DatasetSummary {
  RowFormat format = RowFormat::kText;
  int64_t rows = 0;           ///< Rows in the file.
  int64_t blank_lines = 0;    ///< Lines of a .jsonl without a row, passed over.
  int64_t tokens = 0;         ///< In the examples.
  int64_t target_tokens = 0;  ///< Of these, how many are predicted and scored.
  int64_t longest = 0;        ///< Tokens of the longest example …
  int64_t longest_line = 0;   ///< … and where it is.
  int64_t truncated = 0;      ///< Rows cut at max_length.
  int64_t dropped = 0;        ///< Rows left out because nothing in them is to be learnt.
  int64_t ends_in_eos = 0;    ///< Examples whose last trained token ends a generation (white space may follow it).
  int64_t straddling = 0;     ///< Tokens that hold the end of an untrained part and the start of a trained one. They are trained.
  int64_t first_straddling_line = 0;
  bool eos_known = false;                 ///< Whether ends_in_eos means anything.
  bool end_of_turn_is_one_token = true;   ///< Messages: whether the tokenizer knows the template's end-of-turn token.
  std::vector<std::string> ignored_keys;  ///< Keys of the first row that the format does not use.

  /// One line of facts, and one line a thing that is probably a mistake (no trained EOS, a straddled boundary, cut rows).
  [[nodiscard]] std::string line() const;
  [[nodiscard]] std::vector<std::string> warnings() const;
};

struct Dataset {
  std::vector<Example> examples;
  DatasetSummary summary;

  /// @param tokenizer  may be null for {"input_ids"} rows, whose EOS audit is then left out.
  /// @param chat       may be null when there are no messages.
  /// @throws IoError; FormatError "[file:line] rule; got value. What to do."; ValueError for options that do not fit the rows.
  [[nodiscard]] static Dataset read(const std::string& path, const DatasetOptions& options, const Tokenizer* tokenizer,
                                    const ChatTemplate* chat);

  /// The same with tools that are opened when a row needs them.
  [[nodiscard]] static Dataset read(const std::string& path, const DatasetOptions& options, TextTools& tools);
};

/// @returns the text of an example with its trained tokens between « and ».
[[nodiscard]] std::string render_sample(const Example& example, const Tokenizer& tokenizer);
[[nodiscard]] std::string render_sample(const Example& example, TextTools& tools);

}  // namespace qlorapp
