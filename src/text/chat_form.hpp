// SPDX-License-Identifier: Apache-2.0
/// A chat template as data: what stands around each message. Torch-free.
///
/// In every text {bos}, {eos}, {role}, {date} and {environment} stand for the tokenizer's tokens, the role of the message,
/// ChatOptions::date_string and what Llama 3.1 says of its environment when there are tools.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace qlorapp {

/// What stands around a message: head lead CONTENT tail end behind.
struct TurnForm {
  std::string_view head = {};    ///< A generation prompt ends with it.
  std::string_view lead = {};    ///< The model's own text before the message …
  std::string_view tail = {};    ///< … and after it.
  std::string_view end = {};     ///< Ends the turn, and is learned.
  std::string_view behind = {};  ///< Follows a turn, and is not learned.
  bool trim = false;             ///< The message loses white space at its ends.
};

/// Where a system message is written.
enum class SystemPlace {
  kTurn,       ///< In a turn of its own.
  kFirstUser,  ///< In front of the first user message.
  kJoined,     ///< The same, and the two are trimmed as one text (Llama 2).
  kLastUser,   ///< In front of the last message if that is the user's, else nowhere (Mistral v3).
  kRefused,    ///< Nowhere: the template raises.
};

/// How tools, tool calls and their results are written (chat_tools.hpp).
enum class ToolStyle {
  kNone,
  kHermes,   ///< Qwen2.5: <tool_call> in ChatML.
  kHermes3,  ///< Qwen3: the same, and arguments that are a string are written as they are.
  kLlama31,
};

struct ChatForm {
  std::string_view name = {};
  std::vector<std::string> sources = {};  ///< Published Jinja; {SYSTEM} stands for any text.
  std::string_view begin = {};
  TurnForm system = {}, user = {}, assistant = {};
  std::string_view prompt = {};  ///< add_generation_prompt …
  std::string_view ending = {};  ///< … and what stands there without it.
  SystemPlace system_place = SystemPlace::kTurn;
  std::optional<std::string_view> default_system = std::nullopt;  ///< Where a conversation begins without one.
  bool alternates = false;  ///< After the system message: user, assistant, user … or the template raises.
  bool one_system = false;  ///< A later system message makes the template raise.
  bool any_role = false;    ///< Other roles are written as the user's, with {role}.
  bool skips_empty_system = false;
  bool thinks = false;  ///< Qwen3: the last answers hold their thoughts, earlier ones lose them.
  /// The end of `prompt` that no written answer has, as DeepSeek's distills open a thought there: answers lose their thoughts, and the last
  /// one, where ChatOptions::served, is written behind it with them.
  std::string_view opens = {};
  bool open_end = false;     ///< What stands behind an answer is left out at the end of the conversation.
  bool trims_parts = false;  ///< A content that is a list of texts: each is trimmed, and nothing stands between them.
  ToolStyle tools = ToolStyle::kNone;
};

/// The built-in templates. Several forms may share a name; the first is the one that the name chooses.
[[nodiscard]] std::span<const ChatForm> chat_forms();

/// Their names, each once.
[[nodiscard]] std::span<const std::string_view> chat_form_names();

}  // namespace qlorapp
