// SPDX-License-Identifier: Apache-2.0
#include "row_shape.hpp"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <string_view>
#include <utility>

#include "conversation.hpp"
#include "core/check.hpp"
#include "json/json_tree.hpp"

namespace qlorapp {
namespace {

bool has(const Row& row, std::string_view key) {
  const auto found = row.find(std::string(key));
  return found != row.end() && !found->is_null();
}
bool has_all(const Row& row, std::initializer_list<std::string_view> keys) {
  return std::all_of(keys.begin(), keys.end(), [&](std::string_view key) { return has(row, key); });
}

/// Columns that are a question, what belongs to it, and its answer.
struct InstructionNames {
  std::string_view question, context, answer;
};
constexpr std::array<InstructionNames, 4> kInstructions{{{"instruction", "input", "output"},
                                                         {"instruction", "context", "response"},
                                                         {"question", "context", "answer"},
                                                         {"query", "", "response"}}};

/// Whether a value calls an answer good or bad: a boolean, 0, 1 or -1, or a word for it.
bool is_judgement(const Row& value) {
  static constexpr std::array<std::string_view, 28> kWords{
      "true",     "false",    "0",         "1",           "-1",        "yes",         "no",       "good",     "bad",  "positive",
      "negative", "correct",  "incorrect", "right",       "wrong",     "chosen",      "rejected", "accepted", "like", "dislike",
      "liked",    "disliked", "desirable", "undesirable", "thumbs_up", "thumbs_down", "upvote",   "downvote"};
  if (value.is_number()) return value == 0 || value == 1 || value == -1;
  if (!value.is_string()) return value.is_boolean();
  const std::string& word = value.get_ref<const std::string&>();
  return std::any_of(kWords.begin(), kWords.end(), [&](std::string_view known) {
    return std::equal(known.begin(), known.end(), word.begin(), word.end(),
                      [](char a, char b) { return a == (b >= 'A' && b <= 'Z' ? b + 32 : b); });
  });
}

void refuse_preferences(const Row& row, bool has_answer, const std::string& where) {
  QLORAPP_CHECK_FORMAT(!has_all(row, {"chosen", "rejected"}),
                       "[{}] rows must have completions to train on; 'chosen' and 'rejected' are preference data: train with TRL's "
                       "DPOTrainer. To train on the chosen answers alone, name their column: --completion_column chosen, or "
                       "--messages_column chosen if it holds whole conversations.",
                       where);
  for (const char* label : {"label", "kto_tag"}) {
    const bool judged = has_answer || std::string_view(label) == "kto_tag";
    QLORAPP_CHECK_FORMAT(!judged || !has(row, label) || !is_judgement(row[label]),
                         "[{}] rows must have completions to train on; '{}' marks answers as good or bad, as preference data does: "
                         "train with TRL's KTOTrainer. To train on all answers, good or bad, remove the column.",
                         where, label);
  }
}

void refuse_images(const Row& row, const std::string& where) {
  for (const char* key : {"image", "images", "video", "videos", "audio", "audios"}) {
    QLORAPP_CHECK_FORMAT(
        !has(row, key) || row[key].empty(),
        "[{}] rows must be text; got '{}'. Only text models are supported. Remove the column if the text does not refer to it.",
        where, key);
  }
}

[[noreturn]] void unknown_shape(const Row& row, const std::string& where) {
  std::string advice =
      "Rename the keys, or name the columns: --prompt_column and --completion_column, --messages_column, or "
      "--dataset_text_field.";
  if (has(row, "prompt")) advice = "Add the 'completion', or name its column (--completion_column).";
  if (has(row, "instruction") || has(row, "question") || has(row, "query")) {
    advice = "Name the column of the answers: --prompt_column and --completion_column.";
  }
  for (const auto& [key, value] : row.items()) {
    if (value.is_array() && is_conversation(value)) {
      advice =
          message("If the rows are inside '{}', write that array alone; if it is a conversation, name it: --messages_column {}.",
                  key.substr(0, 64), key.substr(0, 64));
      break;
    }
  }
  std::string keys = joined(keys_of(row));
  if (keys.size() > 200) keys = message("{}…]", keys.substr(0, 200));
  throw FormatError(
      message("[{}] a row must have 'text', 'prompt' and 'completion', 'messages', 'conversations', 'instruction' and 'output', "
              "'question' and 'answer', or 'input_ids'; got keys {}. {}",
              where, keys, advice));
}

/// A string column that may be missing, null or empty.
std::string text_or_empty(const Row& row, const std::string& key, const std::string& where) {
  return key.empty() || !has(row, key) ? std::string() : require_text(row, key, where);
}

Row message_of(const char* role, std::string content) {
  Row out = Row::object();
  out["role"] = role;
  out["content"] = std::move(content);
  return out;
}

Row pair_of(Row prompt, Row completion) {
  Row out = Row::object();
  out["prompt"] = std::move(prompt);
  out["completion"] = std::move(completion);
  return out;
}

}  // namespace

RowShape RowShape::detect(const Row& row, const DatasetOptions& options, const std::function<bool()>& has_template,
                          const std::string& where) {
  QLORAPP_CHECK_FORMAT(row.is_object(), "[{}] a row must be a JSON object; got {}. Write one object per row.", where, kind_of(row));
  const bool names_text = options.text_field != "text", names_messages = !options.messages_field.empty(),
             names_pair = !options.prompt_field.empty() || !options.completion_field.empty();
  QLORAPP_CHECK_VALUE(names_text + names_messages + names_pair <= 1,
                      "[messages_column] the columns must be of one format: --messages_column, or --prompt_column and "
                      "--completion_column, or --dataset_text_field. Leave the others out.");
  const auto named = [&](const std::string& column, const char* option) {
    QLORAPP_CHECK_FORMAT(has(row, column), "[{}] a row must have the column '{}' (--{}); got keys {}. Name one of these.", where,
                         column, option, joined(keys_of(row)));
    return column;
  };
  const auto named_columns = [](const InstructionNames& names) {
    return Instruction{std::string(names.question), std::string(names.context), std::string(names.answer)};
  };
  if (names_messages) return messages(row, named(options.messages_field, "messages_column"));
  if (names_pair) {
    const std::string prompt = options.prompt_field.empty() ? "prompt" : options.prompt_field;
    const std::string completion = options.completion_field.empty() ? "completion" : options.completion_field;
    static_cast<void>(named(prompt, "prompt_column"));
    static_cast<void>(named(completion, "completion_column"));
    const auto known = std::find_if(std::begin(kInstructions), std::end(kInstructions),
                                    [&](const auto& names) { return names.question == prompt && names.answer == completion; });
    if (known != std::end(kInstructions)) return instruction(row, named_columns(*known), has_template());
    const bool strings = row[prompt].is_string() && row[completion].is_string();
    const bool raw = prompt == "prompt" || completion == "completion";  // TRL's names of texts that are trained as they are
    if (strings && !raw && has_template()) return instruction(row, {prompt, "", completion}, true);
    return prompt_completion(row, prompt, completion, where);
  }
  if (names_text)
    return {RowFormat::kText, message("'{}' (text)", named(options.text_field, "dataset_text_field")), {options.text_field}};

  if (has(row, "input_ids")) return {RowFormat::kInputIds, "input_ids", {"input_ids", "labels", "attention_mask"}};
  const auto is_there = [&](const InstructionNames& names) { return has_all(row, {names.question, names.answer}); };
  const bool has_answer = has_all(row, {"prompt", "completion"}) || has(row, "messages") || has(row, "conversations") ||
                          std::any_of(kInstructions.begin(), kInstructions.end(), is_there);
  refuse_preferences(row, has_answer, where);
  refuse_images(row, where);
  for (const char* column : {"messages", "conversations"}) {
    if (has(row, column)) return messages(row, column);
  }
  if (has_all(row, {"prompt", "completion"})) return prompt_completion(row, "prompt", "completion", where);
  if (has(row, "text")) return {RowFormat::kText, "text", {"text"}};
  for (const auto& names : kInstructions) {
    if (is_there(names)) return instruction(row, named_columns(names), has_template());
  }
  unknown_shape(row, where);
}

std::optional<std::string> RowShape::prompt_alone(const Row& row, const DatasetOptions& options) {
  const bool is_of_others = options.text_field != "text" || !options.messages_field.empty();
  const std::string prompt = options.prompt_field.empty() ? "prompt" : options.prompt_field;
  const std::string completion = options.completion_field.empty() ? "completion" : options.completion_field;
  if (is_of_others || !row.is_object() || !has(row, prompt) || has(row, completion)) return std::nullopt;
  const bool is_known = has(row, "input_ids") || has(row, "messages") || has(row, "conversations");
  return options.prompt_field.empty() && is_known ? std::nullopt : std::optional(prompt);
}

void RowShape::add_missing_answer(Row& row) {
  if (!row.is_object()) return;
  const auto is_there = [&](const InstructionNames& names) { return has_all(row, {names.question, names.answer}); };
  if (std::any_of(kInstructions.begin(), kInstructions.end(), is_there)) return;
  for (const auto& names : kInstructions) {
    if (!has(row, names.question)) continue;
    row[std::string(names.answer)] = "";
    return;
  }
}

RowShape RowShape::messages(const Row& row, const std::string& column) {
  std::string description = column == "messages" ? column : message("'{}' (messages)", column);
  const bool sharegpt = is_sharegpt(row[column]);
  if (sharegpt) description = message("'{}' (ShareGPT's from and value, as messages)", column);
  RowShape shape(RowFormat::kMessages, std::move(description), {column, "tools", "functions"});
  shape.messages_ = column;
  shape.use_system(sharegpt || column == "conversations");
  return shape;
}

RowShape RowShape::prompt_completion(const Row& row, const std::string& prompt, const std::string& completion,
                                     const std::string& where) {
  const bool turns = is_conversation(row[prompt]), answered = is_conversation(row[completion]);
  QLORAPP_CHECK_FORMAT(turns == answered,
                       "[{}] '{}' and '{}' must both be strings, or both lists of messages; got {} and {}. Correct the rows.",
                       where, prompt, completion, kind_of(row[prompt]), kind_of(row[completion]));
  std::string description = prompt == "prompt" && completion == "completion"
                                ? std::string("prompt/completion")
                                : message("'{}' and '{}' (prompt/completion)", prompt, completion);
  if (turns) description += " messages";
  RowShape shape(turns ? RowFormat::kPromptMessages : RowFormat::kPromptCompletion, std::move(description), {prompt, completion});
  if (turns) shape.columns_.insert(shape.columns_.end(), {"tools", "functions"});
  shape.use_system(is_sharegpt(row[prompt]));
  shape.prompt_ = prompt;
  shape.completion_ = completion;
  return shape;
}

RowShape RowShape::instruction(const Row& row, Instruction names, bool chat_template) {
  std::string columns = message("'{}'", names.question);
  if (!names.context.empty() && has(row, names.context)) columns += message(" with '{}'", names.context);
  std::string description = message("{} and '{}' ({})", columns, names.answer,
                                    chat_template ? "a user's and an assistant's turn of the chat template"
                                                  : "in Alpaca's prompt text, because the model has no chat template");
  RowShape shape(chat_template ? RowFormat::kPromptMessages : RowFormat::kPromptCompletion, std::move(description),
                 {names.question, names.context, names.answer, "history"});
  shape.use_system(true);
  shape.instruction_ = std::move(names);
  return shape;
}

void RowShape::use_system(bool used) {
  uses_system_ = used;
  if (used) columns_.emplace_back("system");
}

Row RowShape::canonical(Row row, const std::string& where) const {
  const format::DismantledAtEnd row_end(row);
  if (!instruction_.question.empty()) {
    return format_ == RowFormat::kPromptMessages ? as_turns(row, where) : as_alpaca_text(row, where);
  }
  switch (format_) {
    case RowFormat::kMessages: {
      static_cast<void>(require(row, messages_, where));
      Row out = Row::object();
      const bool sharegpt = is_sharegpt(row[messages_]);
      out["messages"] = canonical_messages(std::move(row[messages_]), messages_, where);
      if (uses_system_) put_system(row, out["messages"], where);
      take_tools(row, sharegpt, out, where);
      return out;
    }
    case RowFormat::kPromptCompletion: {
      static_cast<void>(require_text(row, prompt_, where));
      static_cast<void>(require_text(row, completion_, where));
      return pair_of(std::move(row[prompt_]), std::move(row[completion_]));
    }
    case RowFormat::kPromptMessages: {
      static_cast<void>(require(row, prompt_, where));
      static_cast<void>(require(row, completion_, where));
      Row prompt = canonical_messages(std::move(row[prompt_]), prompt_, where);
      Row completion = canonical_messages(std::move(row[completion_]), completion_, where);
      if (uses_system_) put_system(row, prompt, where);
      QLORAPP_CHECK_FORMAT(!prompt.empty() && !completion.empty(),
                           "[{}] '{}' and '{}' must each have a message; got none. Remove the row.", where, prompt_, completion_);
      Row out = pair_of(std::move(prompt), std::move(completion));
      take_tools(row, false, out, where);
      return out;
    }
    default:
      return row;
  }
}

Row RowShape::as_turns(Row& row, const std::string& where) const {
  Row prompt = Row::array();
  if (has(row, "history")) {
    for (const Row& turn : row["history"]) {
      const bool pair = turn.is_array() && turn.size() == 2 && turn[0].is_string() && turn[1].is_string();
      QLORAPP_CHECK_FORMAT(pair,
                           "[{}] 'history' must be a list of [question, answer] pairs; got {} in it. Correct or remove the row.",
                           where, kind_of(turn));
      prompt.push_back(message_of("user", turn[0].get<std::string>()));
      prompt.push_back(message_of("assistant", turn[1].get<std::string>()));
    }
  }
  std::string question = require_text(row, instruction_.question, where);
  const std::string context = text_or_empty(row, instruction_.context, where);
  if (!context.empty()) question += message("{}{}", question.empty() ? "" : "\n", context);
  prompt.push_back(message_of("user", std::move(question)));
  put_system(row, prompt, where);
  Row answer = message_of("assistant", require_text(row, instruction_.answer, where));
  return pair_of(std::move(prompt), Row::array({std::move(answer)}));
}

Row RowShape::as_alpaca_text(Row& row, const std::string& where) const {
  QLORAPP_CHECK_FORMAT(!has(row, "history") || row["history"].empty(),
                       "[{}] 'history' needs a chat template; the model has none. Remove the column, or use a model that has one.",
                       where);
  const std::string context = text_or_empty(row, instruction_.context, where);
  std::string prompt = text_or_empty(row, "system", where);
  if (prompt.empty()) {
    prompt = context.empty()
                 ? "Below is an instruction that describes a task. Write a response that appropriately completes the request."
                 : "Below is an instruction that describes a task, paired with an input that provides further context. "
                   "Write a response that appropriately completes the request.";
  }
  prompt += message("\n\n### Instruction:\n{}", require_text(row, instruction_.question, where));
  if (!context.empty()) prompt += message("\n\n### Input:\n{}", context);
  prompt += "\n\n### Response:\n";
  static_cast<void>(require_text(row, instruction_.answer, where));
  return pair_of(std::move(prompt), std::move(row[instruction_.answer]));
}

}  // namespace qlorapp
