// SPDX-License-Identifier: Apache-2.0
/// Writes a conversation as a ChatForm says. Torch-free.
#pragma once

#include <optional>
#include <span>
#include <string>

#include "chat_form.hpp"
#include "qlorapp/text/chat_template.hpp"

namespace qlorapp {

struct ChatTokens {
  std::string_view bos, eos;
};

/// @param default_system  what stands where the conversation begins without a system message.
/// @throws ValueError for what the template raises for, and for what it would leave out.
[[nodiscard]] RenderedChat write_chat(const ChatForm& form, const ChatTokens& tokens,
                                      const std::optional<std::string>& default_system, std::span<const Message> messages,
                                      const ChatOptions& options);

}  // namespace qlorapp
