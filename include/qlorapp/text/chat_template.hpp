// SPDX-License-Identifier: Apache-2.0
/// Conversations as text: chat templates in Jinja, run as transformers runs them. Torch-free.
///
/// The text equals that of transformers' apply_chat_template, byte for byte; where the template raises, this raises. A template comes with a
/// model from anywhere: it reaches nothing but the conversation, and its run is bounded (src/text/jinja). docs/sft.md says what is not computed.
#pragma once

#include <map>
#include <memory>
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

/// Bytes that the model has to produce: from where generation begins through the token that ends the turn.
using Turn = TextRange;

struct RenderedChat {
  std::string text;         ///< To be encoded with add_special_tokens = false: it has its own.
  std::vector<Turn> turns;  ///< Of the last message if the assistant says it; several where the template marks several parts.
};

struct ChatOptions {
  /// Ends the text with the header of an assistant's turn, for generation.
  bool add_generation_prompt = false;
  /// The variable date_string, "Today Date" in the header of Llama 3.1 and 3.2, e.g. "26 Jul 2024". Unset: the template's own.
  std::optional<std::string> date_string = std::nullopt;
  /// The day that strftime_now() gives. Unset: date_string, or 26 Jul 2024, which is the constant of Llama's templates. (transformers gives the
  /// day of the call, so that the same data would change every midnight.)
  std::optional<std::string> today = std::nullopt;
  std::string tools = {};      ///< A JSON array of tools; empty: none.
  std::string variables = {};  ///< Further variables of the template, as enable_thinking, in a JSON object; empty: none.
  bool turns = true;           ///< RenderedChat::turns may be left empty otherwise.
  /// The last message, an answer, stands behind the text that generation begins with, where the template knows a difference: Mistral
  /// writes the system message only if the user speaks last, and DeepSeek's distills open a thought.
  bool served = false;
};

inline constexpr std::string_view kDefaultDate = "26 Jul 2024";

namespace jinja {
struct Dict;
}

/// A value; copies share the template. All members may be called from several threads.
class ChatTemplate {
 public:
  /// Reads chat_template.jinja, else chat_template of tokenizer_config.json, and the tokens that it uses.
  /// @returns nullopt when the folder has no template, as base models have none.
  /// @throws FormatError for a template that is not Jinja, or uses what is not computed here, naming the way out.
  [[nodiscard]] static std::optional<ChatTemplate> from_folder(const std::string& folder);

  /// @param name_or_file  one of names(), or the path of a .jinja file; the tokens are those of `folder`.
  /// @throws ValueError for a name that is none, with the list; IoError; FormatError as from_folder.
  [[nodiscard]] static ChatTemplate choose(const std::string& name_or_file, const std::string& folder);

  /// The Jinja that choose() runs. @throws as choose(), but for what a file holds.
  [[nodiscard]] static std::string source(const std::string& name_or_file);
  /// Whether a folder has a template of its own, known or not. @throws FormatError, IoError if a file cannot be read.
  [[nodiscard]] static bool is_in(const std::string& folder);

  /// @param tokens  variables of the template: {"bos_token": "<s>", …}.
  /// @throws FormatError "[where] …" as from_folder.
  [[nodiscard]] static ChatTemplate from_source(std::string_view jinja, const std::map<std::string, std::string>& tokens,
                                                const std::string& where);

  /// @throws ValueError for a name that is none of names().
  [[nodiscard]] static ChatTemplate named(std::string_view name, const std::string& bos_token = "<|begin_of_text|>",
                                          const std::string& eos_token = "<|end_of_text|>");
  /// Those that named() accepts.
  [[nodiscard]] static std::span<const std::string_view> names();

  /// The same with the special tokens of a tokenizer, by which the ends of answers are known.
  [[nodiscard]] ChatTemplate with_special_tokens(std::span<const std::string> tokens) const;

  /// @throws ValueError for a conversation that the template raises for, or whose last answer cannot be found in the text.
  [[nodiscard]] RenderedChat render(std::span<const Message> messages, const ChatOptions& options = {}) const;

  /// Whether it looks at this key of a message.
  [[nodiscard]] bool reads_key(std::string_view key) const;

  /// Its Jinja.
  [[nodiscard]] const std::string& jinja() const;

  /// The token that ends an assistant's turn: `<|eot_id|>`, `<|im_end|>`, `</s>` …; nullopt if the template writes none.
  [[nodiscard]] std::optional<std::string> end_of_turn() const;

  struct Parts;

 private:
  ChatTemplate(std::string_view jinja, jinja::Dict tokens, const std::string& where);

  std::shared_ptr<const Parts> parts_;
};

}  // namespace qlorapp
