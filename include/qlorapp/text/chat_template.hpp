// SPDX-License-Identifier: Apache-2.0
/// Conversations as text: the chat templates that are built in. Torch-free.
///
/// A closed set, nothing is evaluated: a model's Jinja source is only compared with known ones. The comparison is by statement
/// (white-space control, quotes, message['role'] / message.role, x.strip() / x | trim and the words of exceptions do not matter; for
/// a conversation without tools neither do the branches that only tools reach), so a template that differs in one visible character
/// is refused. Text equals that of transformers' apply_chat_template; where that raises, this refuses and names the rule.
/// docs/sft.md lists the templates; src/text/chat_forms.cpp describes them.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "qlorapp/text/tokenizer.hpp"

namespace qlorapp {

struct Message {
  std::string role;       ///< system, user, assistant; tool or ipython where the template writes them.
  std::string content;    ///< UTF-8.
  std::string rest = {};  ///< The other keys (tool_calls, reasoning_content …) as a JSON object in their order; empty: none.
  /// Of a content that is a list of texts: these; `content` is joined_parts() of them.
  std::vector<std::string> parts = {};
};

/// The texts with a line feed between them, which is how servers pass a list of texts to a template that accepts strings only.
[[nodiscard]] std::string joined_parts(std::span<const std::string> parts);

/// Where one message stands in the rendered text.
struct Turn {
  std::string role;
  TextRange content;        ///< The message itself. Empty where tool calls are all there is.
  std::size_t begin = 0;    ///< Where generation begins: an assistant's [begin, end) is what the model has to produce …
  std::size_t end = 0;      ///< … and where it ends, behind the end-of-turn token.
  std::size_t message = 0;  ///< Index of the message.
};

struct RenderedChat {
  std::string text;         ///< To be encoded with add_special_tokens = false: it has its own.
  std::vector<Turn> turns;  ///< One per message, of those that are written; if `rewrites`, perhaps the last message's alone.
  /// Whether the template may write a turn in another way when other messages follow it: Qwen3 removes the thoughts of earlier answers.
  bool rewrites = false;
};

struct ChatOptions {
  /// Ends the text with the header of an assistant's turn, for generation.
  bool add_generation_prompt = false;
  /// "Today Date" in the header of Llama 3.1 and 3.2, e.g. "26 Jul 2024". Unset: that date, which is the templates' own
  /// constant. (transformers gives Llama 3.2 the day of the call, so that the same data would change every midnight.)
  std::optional<std::string> date_string = std::nullopt;
  std::string tools = {};  ///< A JSON array of tools; empty: none.
  bool turns = true;       ///< RenderedChat::turns may be left empty otherwise.
  /// The last message, an answer, stands behind the text that generation begins with, where the template knows a difference: Mistral
  /// writes the system message only if the user speaks last.
  bool served = false;
};

inline constexpr std::string_view kDefaultDate = "26 Jul 2024";

struct ChatForm;

/// A value; copies share the form. All members may be called from several threads.
class ChatTemplate {
 public:
  /// Reads chat_template.jinja, else chat_template of tokenizer_config.json, and the tokens that it uses.
  /// @returns nullopt when the folder has no template, as base models have none.
  /// @throws FormatError for a template that is not known, naming the way out.
  [[nodiscard]] static std::optional<ChatTemplate> from_folder(const std::string& folder);

  /// @param name_or_file  one of names(), or the path of a .jinja file; the tokens are those of `folder`.
  /// @throws ValueError for a name that is none, with the list; IoError; FormatError as from_folder.
  [[nodiscard]] static ChatTemplate choose(const std::string& name_or_file, const std::string& folder);

  /// The Jinja that choose() compares or stands for. @throws as choose(), but for a file that is no known template.
  [[nodiscard]] static std::string source(const std::string& name_or_file);
  /// Whether a folder has a template of its own, known or not. @throws FormatError, IoError if a file cannot be read.
  [[nodiscard]] static bool is_in(const std::string& folder);

  /// @throws FormatError "[where] …" as from_folder.
  [[nodiscard]] static ChatTemplate from_source(std::string_view jinja, std::string bos_token, std::string eos_token,
                                                const std::string& where);

  /// @throws ValueError for a name that is none of names().
  [[nodiscard]] static ChatTemplate named(std::string_view name, std::string bos_token = "<|begin_of_text|>",
                                          std::string eos_token = "<|end_of_text|>");
  /// Those that named() accepts.
  [[nodiscard]] static std::span<const std::string_view> names();

  /// @throws ValueError for a conversation that the template raises for or would lose a part of.
  [[nodiscard]] RenderedChat render(std::span<const Message> messages, const ChatOptions& options = {}) const;

  /// Whether tools, tool calls and their results are known to be rendered as the source would.
  /// A source that writes them in another way than the known one is known for conversations without them.
  [[nodiscard]] bool knows_tools() const { return knows_tools_; }

  /// Whether it looks at this key of a message.
  [[nodiscard]] bool reads_key(std::string_view key) const;

  /// Its entry in names().
  [[nodiscard]] std::string_view name() const;
  /// The token that ends an assistant's turn: `<|eot_id|>`, `<|im_end|>`, `</s>` …
  [[nodiscard]] std::string end_of_turn() const;

 private:
  ChatTemplate(const ChatForm& form, std::string bos_token, std::string eos_token);

  const ChatForm* form_;
  std::string bos_token_, eos_token_;
  std::optional<std::string> default_system_;
  bool knows_tools_ = true;
};

/// Whether the conversation has tools, tool calls or results of tools.
[[nodiscard]] bool uses_tools(std::span<const Message> messages, const ChatOptions& options);

}  // namespace qlorapp
