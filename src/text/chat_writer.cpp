// SPDX-License-Identifier: Apache-2.0
#include "chat_writer.hpp"

#include <algorithm>
#include <array>

#include "chat_tools.hpp"
#include "core/check.hpp"
#include "core/nearest_name.hpp"
#include "unicode.hpp"

namespace qlorapp {
namespace {

constexpr std::array<std::string_view, 5> kRoles{"system", "user", "assistant", "tool", "ipython"};

const std::string kNothing;

std::string_view without_newlines(std::string_view text, bool both_ends) {
  while (text.starts_with('\n')) text.remove_prefix(1);
  while (both_ends && text.ends_with('\n')) text.remove_suffix(1);
  return text;
}

class Writer {
 public:
  Writer(const ChatForm& form, const ChatTokens& tokens, std::span<const Message> messages, const ChatOptions& options)
      : form_(form), tokens_(tokens), messages_(messages), options_(options) {}

  RenderedChat write(const std::optional<std::string>& default_system) {
    check();
    out_.text = filled(form_.begin, "");
    std::size_t i = 0;
    if (form_.system_place == SystemPlace::kTurn) i = begin_with_system(default_system);
    else if (messages_[0].role == "system") i = 1;
    if (form_.tools == ToolStyle::kLlama31 && !options_.tools.empty()) write_first_user_with_tools(i++);
    for (; i < messages_.size(); ++i) write_message(i);
    out_.text += filled(options_.add_generation_prompt ? form_.prompt : form_.ending, "");
    out_.rewrites = form_.thinks || !form_.opens.empty() || form_.system_place == SystemPlace::kLastUser;
    return std::move(out_);
  }

 private:
  struct Answer {
    std::string thoughts, said;
  };

  void check() const {
    const bool hermes = form_.tools == ToolStyle::kHermes || form_.tools == ToolStyle::kHermes3;
    const std::size_t roles = form_.any_role ? 5 : hermes ? 4 : 3;
    const bool system = messages_[0].role == "system";
    for (std::size_t i = 0; i < messages_.size(); ++i) {
      const std::string& role = messages_[i].role;
      const auto known = std::find(kRoles.begin(), kRoles.begin() + static_cast<std::ptrdiff_t>(roles), role);
      QLORAPP_CHECK_VALUE(known != kRoles.begin() + static_cast<std::ptrdiff_t>(roles),
                          "[chat_template] a role must be one of {} in {}; got '{}'. {}, or remove the row.{}",
                          joined(std::span(kRoles).first(roles)), form_.name, role,
                          role == "tool" ? "Choose a template that writes results of tools" : "Rename it",
                          did_you_mean(role, std::span(kRoles).first(roles)));
      QLORAPP_CHECK_VALUE(role != "system" || form_.system_place != SystemPlace::kRefused,
                          "[chat_template] {} does not support a system message. Put its text before the first user message.",
                          form_.name);
      QLORAPP_CHECK_VALUE(
          role != "system" || i == 0 || !form_.one_system,
          "[chat_template] in {} only the first message may be a system message; message {} is one too. Join it with the first.",
          form_.name, i);
      const bool users = (i - (system ? 1 : 0)) % 2 == 0;
      QLORAPP_CHECK_VALUE(!form_.alternates || (system && i == 0) || role == (users ? "user" : "assistant"),
                          "[chat_template] in {} user and assistant must alternate, the user first; message {} has role '{}'. Join "
                          "messages of one role, or remove the row.",
                          form_.name, i, role);
    }
    QLORAPP_CHECK_VALUE(form_.system_place == SystemPlace::kTurn || !system || messages_.size() > 1,
                        "[chat_template] {} writes the system message into the first user message; the conversation has no user "
                        "message. Add one, or remove the row.",
                        form_.name);
    QLORAPP_CHECK_VALUE(
        options_.tools.empty() || form_.tools != ToolStyle::kNone,
        "[chat_template] {} does not write tools, so they would be lost. Remove 'tools', or choose another template.", form_.name);
  }

  [[nodiscard]] std::string filled(std::string_view text, std::string_view role) const {
    const std::array<std::pair<std::string_view, std::string_view>, 5> values{{
        {"{bos}", tokens_.bos},
        {"{eos}", tokens_.eos},
        {"{role}", role},
        {"{date}", options_.date_string ? std::string_view(*options_.date_string) : kDefaultDate},
        {"{environment}", options_.tools.empty() ? "" : "Environment: ipython\n"},
    }};
    std::string out;
    while (!text.empty()) {
      const auto value = std::find_if(values.begin(), values.end(), [&](const auto& v) { return text.starts_with(v.first); });
      out += value == values.end() ? text.substr(0, 1) : value->second;
      text.remove_prefix(value == values.end() ? 1 : value->first.size());
    }
    return out;
  }

  /// @param own  whether `content` is the message's own text: it is trimmed then, and its place is told.
  Turn write_turn(const TurnForm& form, std::string_view role, std::string_view content, bool own, std::string_view extra = {}) {
    std::string& text = out_.text;
    Turn turn{std::string(role), {}};
    text += filled(form.head, role);
    turn.begin = text.size();
    text += filled(form.lead, role);
    const std::size_t begin = text.size();
    text += form.trim && own ? unicode::strip(content) : content;
    turn.content = {begin, own ? text.size() : begin};
    text += message("{}{}{}", extra, filled(form.tail, role), filled(form.end, role));
    turn.end = text.size();
    text += filled(form.behind, role);
    return turn;
  }

  void put(Turn turn, std::size_t message) {
    turn.message = message;
    out_.turns.push_back(std::move(turn));
  }

  /// @returns the index of the first message that is still to be written.
  std::size_t begin_with_system(const std::optional<std::string>& default_system) {
    const bool given = messages_[0].role == "system",
               hermes = form_.tools == ToolStyle::kHermes || form_.tools == ToolStyle::kHermes3;
    const std::string_view content = given ? messages_[0].content : default_system ? *default_system : kNothing;
    const bool any = given || default_system.has_value();
    std::string tools;
    if (hermes && !options_.tools.empty()) tools = hermes_tools(options_.tools, any);
    const bool left_out = form_.skips_empty_system && content.empty();
    if ((any || !tools.empty()) && !left_out) {
      const Turn turn = write_turn(form_.system, "system", content, true, tools);
      if (given) put(turn, 0);
    }
    return given ? 1 : 0;
  }

  void write_first_user_with_tools(std::size_t i) {
    QLORAPP_CHECK_VALUE(i < messages_.size() && messages_[i].role == "user",
                        "[chat_template] llama3.1 writes tools into the first user message; the conversation {}. Correct the row.",
                        i < messages_.size() ? "begins with '" + messages_[i].role + "'" : "has none");
    const std::string before = llama31_tools(options_.tools), content(unicode::strip(messages_[i].content));
    Turn turn = write_turn(form_.user, "user", before + content, false);
    turn.content = {turn.begin + before.size(), turn.begin + before.size() + content.size()};
    put(turn, i);
  }

  void write_message(std::size_t i) {
    const Message& message = messages_[i];
    const std::vector<ToolCall> calls = tool_calls_of(message, form_.tools);
    if (message.role == "tool" || message.role == "ipython") {
      if (form_.tools == ToolStyle::kHermes || form_.tools == ToolStyle::kHermes3) return write_hermes_result(i);
      if (form_.tools == ToolStyle::kLlama31) {
        put(write_turn(form_.user, "ipython", json_text(message.content), false), i);
        return;
      }
    }
    if (message.role == "assistant") {
      if (!form_.opens.empty() && options_.served && i + 1 == messages_.size()) return write_opened(i);
      const auto [thoughts, said] =
          form_.thinks ? answer(i) : Answer{"", form_.opens.empty() ? message.content : behind_thoughts(i)};
      const std::string text = calls.empty() ? said : written_calls(calls, said, form_.tools);
      const std::string_view shown = thoughts.empty() ? std::string_view(text) : without_newlines(text, false);
      put(write_turn(form_.assistant, message.role, qlorapp::message("{}{}", thoughts, shown), calls.empty()), i);
      if (form_.open_end && i + 1 == messages_.size())
        out_.text.resize(out_.text.size() - filled(form_.assistant.behind, message.role).size());
      return;
    }
    if (message.role == "user" && write_user_with_system(i)) return;
    const bool system = message.role == "system" && !form_.any_role;
    if (system && form_.skips_empty_system && message.content.empty()) return;
    put(write_turn(system ? form_.system : form_.user, message.role, message.content, true), i);
  }

  /// The user's message that holds the system message too, if this is the one.
  bool write_user_with_system(std::size_t i) {
    if (messages_[0].role != "system" || form_.system_place == SystemPlace::kTurn) return false;
    const std::size_t answers = options_.served && messages_.back().role == "assistant" ? 1 : 0;
    if (form_.system_place == SystemPlace::kLastUser ? i + 1 + answers != messages_.size() : i != 1) return false;
    const TurnForm& system = form_.system;
    const std::string& said = messages_[0].content;
    const std::string before = message("{}{}{}", system.head, said, system.end);
    std::string_view content = messages_[i].content;
    const std::string joined = message("{}{}", before, content);
    const bool together = form_.system_place == SystemPlace::kJoined;
    if (form_.user.trim && !together) content = unicode::strip(content);
    const std::string text = together ? std::string(unicode::strip(joined)) : message("{}{}", before, content);
    Turn turn = write_turn(form_.user, "user", text, false);
    const std::size_t begin = turn.begin + system.head.size();
    const auto within = [&](std::size_t at) { return std::min(at, turn.begin + text.size()); };
    put({"system", {begin, begin + said.size()}, begin, begin + said.size()}, 0);
    turn.content = {within(turn.begin + before.size()), within(turn.begin + before.size() + content.size())};
    put(turn, i);
    return true;
  }

  /// Results that follow each other share a turn of the user.
  void write_hermes_result(std::size_t i) {
    const auto is_result = [&](std::size_t k) { return k < messages_.size() && messages_[k].role == "tool"; };
    std::string& text = out_.text;
    if (i == 0 || !is_result(i - 1)) text += "<|im_start|>user";
    text += "\n<tool_response>\n";
    const std::size_t begin = text.size();
    text += messages_[i].content;
    const TextRange content{begin, text.size()};
    text += "\n</tool_response>";
    if (!is_result(i + 1)) text += "<|im_end|>\n";
    put({"tool", content, begin, text.size()}, i);
  }

  static constexpr std::string_view kOpen = "<think>", kClose = "</think>";

  [[nodiscard]] std::string behind_thoughts(std::size_t i) const {
    const std::string& content = messages_[i].content;
    const auto close = content.rfind(kClose);
    return close == std::string::npos ? content : content.substr(close + kClose.size());
  }

  /// The last answer behind the thought that generation begins with. Without thoughts it ends at once.
  void write_opened(std::size_t i) {
    const std::string& content = messages_[i].content;
    std::string said;
    if (content.find(kClose) != std::string::npos) {
      std::string_view rest = content;
      const std::string_view inside = unicode::strip(content);
      rest.remove_prefix(static_cast<std::size_t>(inside.data() - content.data()));
      if (rest.starts_with(kOpen)) rest.remove_prefix(kOpen.size());
      said = without_newlines(rest, false);
    } else {
      const std::string given = reasoning_of(messages_[i]).value_or("");
      const std::string_view thoughts = without_newlines(given, true);
      said = message("{}{}{}\n\n{}", thoughts, thoughts.empty() ? "" : "\n", kClose, content);
    }
    std::string& text = out_.text;
    text += filled(form_.prompt, "assistant");
    const std::size_t begin = text.size();
    text += said;
    const std::size_t end = text.size();
    text += filled(form_.assistant.end, "assistant");
    put({"assistant", {begin, end}, begin, text.size()}, i);
    text += filled(form_.assistant.behind, "assistant");
  }

  /// Qwen3: behind the last question an answer stands with its thoughts, in front of it without.
  [[nodiscard]] Answer answer(std::size_t i) const {
    std::size_t question = messages_.size() - 1;
    for (std::size_t k = messages_.size(); k-- > 0;) {
      const std::string& content = messages_[k].content;
      if (messages_[k].role != "user" || (content.starts_with("<tool_response>") && content.ends_with("</tool_response>")))
        continue;
      question = k;
      break;
    }
    std::string_view content = messages_[i].content;
    std::string thought;
    if (const auto given = reasoning_of(messages_[i])) {
      thought = *given;
    } else if (const auto close = content.find(kClose); close != std::string_view::npos) {
      std::string_view inside = content.substr(0, close);
      while (inside.ends_with('\n')) inside.remove_suffix(1);
      if (const auto open = inside.rfind(kOpen); open != std::string_view::npos) inside = inside.substr(open + kOpen.size());
      thought = without_newlines(inside, false);
      content = without_newlines(content.substr(content.rfind(kClose) + kClose.size()), false);
    }
    const bool shown = i > question && (i + 1 == messages_.size() || !thought.empty());
    return {shown ? message("<think>\n{}\n</think>\n\n", without_newlines(thought, true)) : "", std::string(content)};
  }

  const ChatForm& form_;
  const ChatTokens& tokens_;
  std::span<const Message> messages_;
  const ChatOptions& options_;
  RenderedChat out_;
};

}  // namespace

RenderedChat write_chat(const ChatForm& form, const ChatTokens& tokens, const std::optional<std::string>& default_system,
                        std::span<const Message> messages, const ChatOptions& options) {
  return Writer(form, tokens, messages, options).write(default_system);
}

}  // namespace qlorapp
