// SPDX-License-Identifier: Apache-2.0
/// Conversations as text: the chat templates of Llama 3, Llama 3.1/3.2 and ChatML. Torch-free.
///
/// A closed set, nothing is evaluated: a model's Jinja source is only compared with known ones. The comparison is by statement
/// (white-space control, quotes and message['role'] / message.role do not matter; branches that only tools reach are left out),
/// so a template that differs in one visible character is refused. Text equals transformers' apply_chat_template for the roles
/// system, user and assistant.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "qlorapp/data/tokenizer.hpp"

namespace qlorapp {

struct Message {
  std::string role;     ///< system, user or assistant.
  std::string content;  ///< UTF-8. Llama strips white space at its ends, ChatML does not.
};

/// Where one message stands in the rendered text.
struct Turn {
  std::string role;
  TextRange content;    ///< The message itself.
  std::size_t end = 0;  ///< Behind the end-of-turn token: an assistant's [content.begin, end) is what the model has to produce.
};

struct RenderedChat {
  std::string text;         ///< To be encoded with add_special_tokens = false: it has its own.
  std::vector<Turn> turns;  ///< One a message.
};

struct ChatOptions {
  /// Ends the text with the header of an assistant's turn, for generation.
  bool add_generation_prompt = false;
  /// "Today Date" in the header of Llama 3.1 and 3.2, e.g. "26 Jul 2024". Unset: that date, which is the templates' own
  /// constant. (transformers gives Llama 3.2 the day of the call, so that the same data would change every midnight.)
  std::optional<std::string> date_string;
};

class ChatTemplate {
 public:
  enum class Kind { kLlama3, kLlama31, kChatMl };

  /// Reads chat_template.jinja, else chat_template of tokenizer_config.json, and bos_token.
  /// @returns nullopt when the folder has no template, as base models have none.
  /// @throws FormatError for a template that is not known, naming the way out.
  [[nodiscard]] static std::optional<ChatTemplate> from_folder(const std::string& folder);

  /// @param bos_token  what the Llama templates begin with.
  /// @throws FormatError "[where] …" as from_folder.
  [[nodiscard]] static ChatTemplate from_source(std::string_view jinja, std::string bos_token, const std::string& where);

  /// @param name  "llama3", "llama3.1" or "chatml". @throws ValueError otherwise.
  [[nodiscard]] static ChatTemplate named(std::string_view name, std::string bos_token = "<|begin_of_text|>");

  /// @throws ValueError for no messages and for other roles.
  [[nodiscard]] RenderedChat render(std::span<const Message> messages, const ChatOptions& options = {}) const;

  [[nodiscard]] Kind kind() const { return kind_; }
  [[nodiscard]] std::string_view name() const;
  /// The token that ends a turn: <|eot_id|> or <|im_end|>.
  [[nodiscard]] std::string_view end_of_turn() const;

 private:
  ChatTemplate(Kind kind, std::string bos_token) : kind_(kind), bos_token_(std::move(bos_token)) {}
  void render_llama(std::span<const Message> messages, const ChatOptions& options, RenderedChat& out) const;
  void render_chatml(std::span<const Message> messages, RenderedChat& out) const;

  Kind kind_;
  std::string bos_token_;
  std::optional<std::string> default_system_;  ///< ChatML: what stands where a conversation has no system message.
};

}  // namespace qlorapp
