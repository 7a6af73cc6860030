// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/data/prompts.hpp"

#include <algorithm>
#include <optional>
#include <utility>

#include "conversation.hpp"
#include "core/check.hpp"
#include "qlorapp/text/text_tools.hpp"
#include "row_encoder.hpp"
#include "row_message.hpp"
#include "row_reader.hpp"
#include "row_shape.hpp"

namespace qlorapp {
namespace {

/// An answer that a row of the shape's format has, as text.
std::string answer_in(const Row& completion) {
  if (completion.is_string()) return completion.get<std::string>();
  std::string out;
  for (const Row& entry : completion) {
    if (entry.contains("content") && entry["content"].is_string()) out += entry["content"].get<std::string>();
  }
  return out;
}

class PromptReader {
 public:
  PromptReader(const PromptOptions& options, TextTools& tools, std::string file)
      : options_(options), tools_(tools), file_(std::move(file)) {}

  Prompt read(Row row, int64_t line) {
    const std::string where = message("{}:{}", file_, line);
    if (row.is_string()) row = Row{{"prompt", std::move(row)}};
    const std::optional<std::string> prompt = RowShape::prompt_alone(row, options_.rows);
    Prompt out = prompt ? of_prompt(row, *prompt, where) : of_row(std::move(row), where);
    out.line = line;
    return out;
  }

 private:
  /// A row that is nothing but a prompt, and may have a system message.
  Prompt of_prompt(Row& row, const std::string& column, const std::string& where) {
    PromptOptions own = options_;
    if (const auto system = row.find("system"); system != row.end() && system->is_string() && !system->empty())
      own.system = system->get<std::string>();
    if (row[column].is_string()) return prompt_of(row[column].get<std::string>(), own, tools_);
    Row conversation{{"messages", std::move(row[column])}};
    if (row.contains("tools")) conversation["tools"] = std::move(row["tools"]);
    return of_messages(std::move(conversation), where, own.system);
  }

  Prompt of_row(Row row, const std::string& where) {
    RowShape::add_missing_answer(row);
    if (!shape_)
      shape_ = RowShape::detect(
          row, options_.rows, [&] { return tools_.has_template(); }, where);
    Row canonical = shape_->canonical(std::move(row), where);
    switch (shape_->format()) {
      case RowFormat::kMessages:
        return of_messages(std::move(canonical), where, options_.system);
      case RowFormat::kPromptMessages: {
        std::string answer = answer_in(canonical["completion"]);
        canonical["messages"] = std::move(canonical["prompt"]);
        Prompt out = of_messages(std::move(canonical), where, options_.system, /*is_whole=*/true);
        out.answer = std::move(answer);
        return out;
      }
      case RowFormat::kPromptCompletion: {
        Prompt out = as_it_stands(require_text(canonical, "prompt", where));
        out.answer = answer_in(canonical["completion"]);
        return out;
      }
      case RowFormat::kText:
        return as_it_stands(require_text(canonical, options_.rows.text_field, where));
      case RowFormat::kInputIds:
        return of_ids(canonical, where);
    }
    throw Error("[prompts] a format without a name");
  }

  Prompt as_it_stands(const std::string& text) {
    tools_.require_tokenizer(file_);
    return {.ids = tools_.encode(text, true).ids, .text = Row(text).dump(), .answer = {}};
  }

  Prompt of_ids(const Row& row, const std::string& where) {
    DatasetOptions whole = options_.rows;
    whole.max_length = 0;
    Example example = RowEncoder(RowFormat::kInputIds, whole, tools_, file_).encode(row, where).front();
    const auto trained = std::ranges::find_if(example.labels, [](TokenId label) { return label != Example::kIgnored; });
    const auto begin = trained - example.labels.begin();
    if (begin > 0) example.input_ids.resize(static_cast<size_t>(begin));
    QLORAPP_CHECK_FORMAT(!example.input_ids.empty(), "[{}] a prompt must have a token; got none. Remove the row.", where);
    std::string text = Row(example.input_ids).dump();
    return {.ids = std::move(example.input_ids), .text = std::move(text), .answer = {}};
  }

  /// @param row  {"messages", "tools"?}.  @param is_whole  the answer is elsewhere; the last message belongs to the prompt.
  Prompt of_messages(Row row, const std::string& where, const std::string& system, bool is_whole = false) {
    tools_.require_template(file_);
    Row list = canonical_messages(std::move(row["messages"]), "messages", where);
    Prompt out;
    if (!is_whole && !list.empty() && list.back().value("role", "") == "assistant") {
      out.answer = answer_in(Row::array({list.back()}));
      list.erase(list.end() - 1);
    }
    QLORAPP_CHECK_FORMAT(!list.empty(), "[{}] a conversation must have a message before the answer; got none. Remove the row.",
                         where);
    if (!system.empty()) put_system({{"system", system}}, list, where);
    out.text = list.dump();
    std::vector<Message> messages;
    for (const Row& entry : list) messages.push_back(read_message(entry, where).message);
    try {
      out.ids = ids_of_conversation(messages, tools_, options_.rows.date_string, row.contains("tools") ? row["tools"].dump() : "");
    } catch (const Error& error) {
      throw FormatError(message("[{}] the conversation must fit the template: {}", where, error.what()));
    }
    return out;
  }

  const PromptOptions& options_;
  TextTools& tools_;
  std::string file_;
  std::optional<RowShape> shape_;
};

}  // namespace

std::vector<TokenId> ids_of_conversation(std::span<const Message> messages, TextTools& tools,
                                         const std::optional<std::string>& date, const std::string& functions) {
  ChatOptions begun{.add_generation_prompt = true, .date_string = date, .turns = false};
  begun.tools = functions;
  return tools.encode(tools.render(messages, begun).text, false).ids;
}

Prompt prompt_of(std::string_view text, const PromptOptions& options, TextTools& tools) {
  tools.require_tokenizer("the prompt");
  const bool chat = !options.raw && tools.has_template();
  QLORAPP_CHECK_VALUE(chat || options.system.empty(), "[generate] --system {}.",
                      options.raw ? "is part of the chat template, which --raw leaves out. Leave out one of them"
                                  : "needs a model with a chat template");
  Prompt out;
  if (chat) {
    std::vector<Message> messages;
    if (!options.system.empty()) messages.push_back({"system", options.system});
    messages.push_back({"user", std::string(text)});
    out.ids = ids_of_conversation(messages, tools, options.rows.date_string);
  } else {
    out.ids = tools.encode(text, true).ids;
  }
  out.text = Row(std::string(text)).dump();  // it is UTF-8
  return out;
}

std::vector<Prompt> read_prompts(const std::string& path, const PromptOptions& options, TextTools& tools) {
  std::vector<Prompt> prompts;
  PromptReader reader(options, tools, path);
  // A line of a text file is a prompt, unless its column has another name.
  const std::string column = options.rows.text_field == "text" ? "prompt" : options.rows.text_field;
  for_each_row(path, options.rows.file_format, column,
               [&](Row row, int64_t line) { prompts.push_back(reader.read(std::move(row), line)); });
  QLORAPP_CHECK_FORMAT(!prompts.empty(), "[{}] the file must hold a prompt; got none.", path);
  return prompts;
}

}  // namespace qlorapp
