// SPDX-License-Identifier: Apache-2.0
/// A chat template as Ollama has it: Go's text/template over .System and .Messages. Torch-free.
///
/// Found by rendering conversations with the Jinja template and cutting the text at their messages, then compared with it over others.
/// Source: Ollama's pages about templates and the Modelfile.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "qlorapp/text/chat_template.hpp"

namespace qlorapp {

/// What stands between the messages of a conversation.
class OllamaTemplate {
 public:
  /// @param bos  text that is left out in front: who runs the template puts it there. Empty: none.
  /// @throws FormatError for a template that writes conversations in another way.
  OllamaTemplate(const ChatTemplate& jinja, const std::string& bos);

  /// In Go's language. It ends with the header of an answer.
  [[nodiscard]] std::string go() const;
  /// Whether it writes a system message.
  [[nodiscard]] bool has_system() const { return system_.has_value(); }
  /// What go() makes of a conversation.
  [[nodiscard]] std::string render(std::span<const Message> messages) const;

 private:
  /// The system message goes before the first message of the user, or before the last.
  struct System {
    std::string before, behind;
    bool last = false;
  };
  void find_system(const ChatTemplate& jinja);
  void check(const ChatTemplate& jinja) const;

  std::string bos_;
  std::string start_;             ///< Before the first message, unless a system message is there.
  std::string asked_, answered_;  ///< Behind a message of the user, and of the assistant.
  std::string generation_;        ///< Behind the last message.
  std::optional<System> system_;
};

}  // namespace qlorapp
