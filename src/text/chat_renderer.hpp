// SPDX-License-Identifier: Apache-2.0
/// Renders a conversation and finds its last answer in the text. Works for every template. Torch-free.
///
/// An answer begins where generation begins: behind the text of the messages in front of it with the header of an answer. It ends behind the
/// special token that follows its text. A template with {% generation %} says both itself.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "jinja/template.hpp"
#include "qlorapp/text/chat_template.hpp"

namespace qlorapp {

/// A parsed chat template with the tokens that it is rendered with.
struct ChatTemplate::Parts {
  jinja::Template jinja;
  std::string source;
  jinja::Dict tokens;                 ///< bos_token, eos_token …: variables of every template.
  std::vector<std::string> specials;  ///< The tokenizer's special tokens.
};

class ChatRenderer {
 public:
  ChatRenderer(const ChatTemplate::Parts& parts, std::span<const Message> messages, const ChatOptions& options);

  /// @throws ValueError if the template raises, or if the answer cannot be found.
  [[nodiscard]] RenderedChat render();

 private:
  struct Answer {
    std::vector<TextRange> ranges;
    bool ended = true;  ///< Whether a special token ends it.
  };

  [[nodiscard]] jinja::Template::Rendered run(std::span<const jinja::Value> messages, bool prompt) const;
  [[nodiscard]] std::string head_of_answer() const;
  [[nodiscard]] bool writes_lists() const;
  void join_lists();
  [[nodiscard]] Answer answer_in(std::string& text, const std::vector<std::pair<std::size_t, std::size_t>>& generated) const;
  [[nodiscard]] std::optional<Answer> answer_with_calls(const std::string& text, std::size_t begin) const;
  [[nodiscard]] std::optional<Answer> answer_behind_opening(std::string& text) const;
  [[nodiscard]] std::optional<std::string> tail_of_answer() const;
  [[nodiscard]] std::string next_header() const;

  const ChatTemplate::Parts& parts_;
  const ChatOptions& options_;
  std::vector<jinja::Value> messages_;
};

/// The token that ends an answer, by what the template writes behind one; nullopt if it writes none.
[[nodiscard]] std::optional<std::string> end_of_answer(const ChatTemplate::Parts& parts);

}  // namespace qlorapp
