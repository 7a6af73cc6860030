// SPDX-License-Identifier: Apache-2.0
/// Conversations as data sets write them, in one form: [{"role", "content", …}]. Torch-free.
#pragma once

#include <string>

#include "text/json_reading.hpp"

namespace qlorapp {

/// A list of messages, or one message, as [{"role", "content", …}] without keys that are null.
///
/// ShareGPT's {"from", "value"}: human and user are the user; gpt, assistant, model, chatgpt and bing the assistant; system the system;
/// observation, tool and function_response a tool; function_call is an assistant's message whose value, JSON of one call or a list of
/// calls, becomes "tool_calls". Roles of {"role", "content"} stay as they are: the template judges them. (LLaMA-Factory, data/README.md.)
/// @param name  the column, for messages. @throws FormatError "[where] …" for anything else.
[[nodiscard]] Row canonical_messages(Row value, const std::string& name, const std::string& where);

/// @returns whether a value is a list of messages, or one: an object, or a list that begins with one.
[[nodiscard]] bool is_conversation(const Row& value);
/// @returns whether the first message has "from", as ShareGPT's have.
[[nodiscard]] bool is_sharegpt(const Row& value);

/// Puts the row's "tools" (a list, or JSON of one) and "functions" beside `into`'s messages, if they are there and not empty.
/// @param sharegpt  LLaMA-Factory writes bare functions: {"name", "parameters"} becomes {"type": "function", "function": …}.
void take_tools(Row& row, bool sharegpt, Row& into, const std::string& where);

/// Puts a "system" column in front of messages that do not begin with a system message. Empty and null mean none.
void put_system(const Row& row, Row& messages, const std::string& where);

}  // namespace qlorapp
