// SPDX-License-Identifier: Apache-2.0
/// Training rows: a file of JSON lines, a JSON array, CSV, TSV or text, gzipped or not, becomes token ids and labels. Torch-free.
///
/// The columns of the first row decide the shape and every row is held to it; columns that are null are missing. In this order:
///   input_ids, labels?                       already tokens; labels default to the tokens
///   messages: [{"role", "content"}, …]       rendered by a chat template; "tools" beside them
///   conversations: [{"from", "value"}, …]    the same (ShareGPT); "system" and "tools" beside them
///   prompt, completion                       strings: one text, EOS appended if missing; lists of messages: rendered
///   text                                     one text, EOS appended if missing
///   instruction, input?, output              (alpaca; also instruction/context/response, question/answer, query/response) with a chat
///                                            template a user's and an assistant's turn, otherwise Alpaca's prompt text
/// Preference data (chosen/rejected, or a label that calls answers good or bad) is refused. Text that the template does not write is
/// refused, too. With assistant_only_loss, or flags on messages, a template that rewrites earlier turns (Qwen3's removes their thoughts)
/// gives one example per answer.
/// Labels are the ids, or -100 where nothing is learned. They are not shifted: position i + 1 is what i predicts, so a
/// label at position 0 is never scored. Rows are cut at max_length (the start is kept) and then left out if no label remains.
/// Semantics: TRL's SFTTrainer, except for tokens across a boundary (see DatasetSummary::straddling).
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "qlorapp/text/chat_template.hpp"
#include "qlorapp/text/tokenizer.hpp"

namespace qlorapp {

class TextTools;

/// One row, ready to be trained on.
struct Example {
  static constexpr TokenId kIgnored = -100;
  std::vector<TokenId> input_ids;
  std::vector<TokenId> labels;  ///< As long as input_ids; an id or kIgnored.
  int64_t line = 0;             ///< Where the row starts in its file, from 1. Several rows may be in one line.
  /// Of a pack (data/packing.hpp): the lengths of its rows, in order. Empty: one row.
  std::vector<int64_t> row_lengths = {};
  /// ends_in_trained_eos(), where the tokenizer was at hand.
  std::optional<bool> ends_in_eos = std::nullopt;
  int64_t row = 0;  ///< Number of the row among those that were read. Several examples may be of one row.
};

/// Whether the last token that is not white space is trained and ends a generation. ChatML ends a turn with a line feed behind the token.
/// @param ends      the tokens that end a generation.
/// @param is_blank  whether a token is white space; empty: none is.
[[nodiscard]] bool ends_in_trained_eos(const Example& example, std::span<const TokenId> ends,
                                       const std::function<bool(TokenId)>& is_blank);

/// How a file is cut into rows. kByName: .csv, .tsv and .txt (kLines) by the name of the file, kJson otherwise.
enum class FileFormat { kByName, kJson, kCsv, kTsv, kLines, kParagraphs };
/// @param name  "auto", "json", "csv", "tsv", "text" (a line is a row) or "paragraphs" (blank lines separate rows).
/// @throws ValueError otherwise.
[[nodiscard]] FileFormat parse_file_format(std::string_view name);

struct DatasetOptions {
  int64_t max_length = 1024;                      ///< Tokens a row may have; 0: no limit.
  std::optional<bool> completion_only_loss = {};  ///< Prompts get no loss. Unset: true for prompt/completion, false for messages.
  bool assistant_only_loss = false;               ///< Messages: only assistants' turns get loss, their end-of-turn token included.
  /// Messages, unless completion_only_loss is false: the same without a word about it. Fails with FormatError where turns cannot be found.
  bool prefer_assistant_only = false;
  bool append_eos = true;  ///< Text and completions end with EOS.
  FileFormat file_format = FileFormat::kByName;
  std::string text_field = "text";    ///< The column of texts. Another name than "text" decides the shape; so do the next three.
  std::string prompt_field = {};      ///< The column of prompts; empty: detected.
  std::string completion_field = {};  ///< The column of completions; empty: detected.
  std::string messages_field = {};    ///< The column of conversations; empty: detected.
  int64_t model_vocab_size = 0;       ///< Ids must be below; 0: below the tokenizer's own limit.
  std::optional<std::string> date_string = {};  ///< See ChatOptions.
};

/// kPromptMessages: prompt and completion are lists of messages.
enum class RowFormat { kInputIds, kMessages, kPromptCompletion, kPromptMessages, kText };
/// The columns that make a row of it: "input_ids", "messages", "prompt/completion" …
[[nodiscard]] std::string_view to_string(RowFormat format);

/// A summary of the rows that were read, for logs. Training does not need it.
struct DatasetSummary {
  RowFormat format = RowFormat::kText;
  std::string detected;        ///< The form of the rows and the use of their columns: "question and answer, as turns of …".
  int64_t rows = 0;            ///< Rows in the file.
  int64_t examples = 0;        ///< Of these rows; more than one of some conversations (split_rows).
  int64_t blank_lines = 0;     ///< Lines without a row, passed over.
  int64_t tokens = 0;          ///< In the examples.
  int64_t target_tokens = 0;   ///< Of these, how many are predicted and scored.
  int64_t longest = 0;         ///< Tokens of the longest example …
  int64_t longest_line = 0;    ///< … and where it is.
  int64_t truncated = 0;       ///< Examples cut at max_length.
  int64_t dropped = 0;         ///< Rows left out because nothing in them is to be learned.
  int64_t split_rows = 0;      ///< Rows with several examples: one per answer, because the template rewrites earlier turns …
  int64_t split_examples = 0;  ///< … and these examples.
  int64_t flagged_rows = 0;  ///< Rows of messages with flags of training: they train the assistant's messages that are not masked.
  bool others_train_all = false;  ///< Whether the rows of messages without flags train all tokens.
  int64_t misplaced_flags = 0;    ///< Messages of the user, the system or a tool that a flag calls trained. They are not.
  int64_t rewritten_rows = 0;     ///< Rows that lose trained text: the template leaves it out where other messages follow.
  int64_t first_rewritten_line = 0;
  int64_t ends_in_eos = 0;    ///< Examples whose last trained token ends a generation (white space may follow it).
  int64_t empty_answers = 0;  ///< Rows whose answer (or text) is white space: they train the end of a text alone.
  int64_t first_empty_line = 0;
  int64_t straddling = 0;  ///< Tokens that hold the end of an untrained part and the start of a trained one. They are trained.
  int64_t first_straddling_line = 0;
  bool eos_known = false;                         ///< Whether ends_in_eos means anything.
  bool end_of_turn_is_one_token = true;           ///< Messages: whether the tokenizer knows the template's end-of-turn token.
  std::vector<std::string> flags;                 ///< Keys of messages that say whether they are trained.
  std::vector<std::string> ignored_keys;          ///< Columns of the first row that are not used.
  std::vector<std::string> ignored_message_keys;  ///< Keys of messages that the template does not read.

  /// One line of facts, and one line a thing that is probably a mistake (no trained EOS, a straddled boundary, cut rows).
  [[nodiscard]] std::string line() const;
  [[nodiscard]] std::vector<std::string> warnings() const;
};

struct Dataset {
  std::vector<Example> examples;
  DatasetSummary summary;

  /// @param tokenizer  may be null for {"input_ids"} rows, whose EOS audit is then left out.
  /// @param chat       may be null when there are no messages.
  /// @throws IoError, FormatError "[file:line] rule; got value. What to do."; ValueError for options that do not fit the rows.
  [[nodiscard]] static Dataset read(const std::string& path, const DatasetOptions& options, const Tokenizer* tokenizer,
                                    const ChatTemplate* chat);

  /// The same with tools that are opened when a row needs them.
  [[nodiscard]] static Dataset read(const std::string& path, const DatasetOptions& options, TextTools& tools);
};

/// @returns the text of an example with its trained tokens between « and ».
[[nodiscard]] std::string render_sample(const Example& example, const Tokenizer& tokenizer);
[[nodiscard]] std::string render_sample(const Example& example, TextTools& tools);

}  // namespace qlorapp
