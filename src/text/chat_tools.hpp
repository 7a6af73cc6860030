// SPDX-License-Identifier: Apache-2.0
/// Tools and calls of tools as templates write them. Torch-free.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "chat_form.hpp"
#include "qlorapp/text/chat_template.hpp"

namespace qlorapp {

/// A call of a tool: its name and its arguments as JSON, or as they are where they are a string that the template does not quote.
struct ToolCall {
  std::string name, arguments;
};

/// @returns the calls in Message::rest. @throws ValueError for what the template would raise for.
[[nodiscard]] std::vector<ToolCall> tool_calls_of(const Message& message, ToolStyle style);

/// What the system message of a conversation with tools ends in. @param behind  whether something stands in front of it.
[[nodiscard]] std::string hermes_tools(const std::string& tools, bool behind);

/// Llama 3.1: what stands in front of the first user message.
[[nodiscard]] std::string llama31_tools(const std::string& tools);

/// An assistant's turn, without header and end.
[[nodiscard]] std::string written_calls(const std::vector<ToolCall>& calls, std::string_view content, ToolStyle style);

/// A text as a JSON string, as Llama 3.1 writes the result of a tool.
[[nodiscard]] std::string json_text(std::string_view text);

/// reasoning_content of Message::rest, if it is a string.
[[nodiscard]] std::optional<std::string> reasoning_of(const Message& message);

}  // namespace qlorapp
