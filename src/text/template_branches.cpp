// SPDX-License-Identifier: Apache-2.0
#include "template_branches.hpp"

#include <algorithm>
#include <array>
#include <span>
#include <utility>

namespace qlorapp {
namespace {

/// A condition of which it is known here whether it holds. `only_body`: the rule is about an `if` with this one statement in it.
struct Decided {
  std::string_view condition;
  bool holds;
  std::string_view only_body = {};
};

/// Nothing here gives a template built-in tools, nor tools other than as `tools`.
constexpr std::array<Decided, 6> kAlways{{
    {"false == true", false},
    {"custom_tools is defined", false},
    {"builtin_tools is defined", false},
    {"builtin_tools is defined and tool_call . name in builtin_tools", false},
    {"not add_generation_prompt is defined", false, "set add_generation_prompt = false"},
    {"add_generation_prompt is not defined", false, "set add_generation_prompt = false"},
}};

/// In a conversation without tools.
constexpr std::array<Decided, 20> kWithoutTools{{
    {"tools", false},
    {R"(message . role == "tool")", false},
    {R"(message . role == "assistant_tool_call")", false},
    {R"(message . role == "tool_response")", false},
    {R"(message . role == "assistant" and message . content is none)", false},
    {R"(message . role == "assistant" and message . tool_calls)", false},
    {"ns . is_tool", false},
    {"tools is not none", false},
    {"tools is not none and not tools_in_user_message", false},
    {"tools_in_user_message and not tools is none", false},
    {"tools is not none and ( message == user_messages [ - 1 ] )", false},
    {"not tools is defined", false, "set tools = none"},
    {"not tools_in_user_message is defined", false, "set tools_in_user_message = true"},
    {"not tools_in_user_message is defined", false, "set tools_in_user_message = false"},
    {R"("tool_calls" in message)", false},
    {R"(message . role == "tool" or message . role == "ipython")", false},
    {R"(message . role == "tool_results" or message . role == "tool")", false},
    {"message . tool_calls is defined and message . tool_calls is not none", false},
    {R"(not ( message . role == "ipython" or message . role == "tool" or "tool_calls" in message ))", true},
    {R"(not ( message . role == "tool" or message . role == "tool_results" or ( message . tool_calls is defined and message . tool_calls is not none ) ))",
     true},
}};

/// @returns the index of the endif, or of the first elif or else, that belongs to the `if` or `elif` at `i`; the size when there is
/// none.
std::size_t next_branch(const Statements& s, std::size_t i, bool only_end) {
  int depth = 0;
  for (++i; i < s.size(); ++i) {
    if (s[i].starts_with("if ")) ++depth;
    const bool end = s[i] == "endif";
    if (depth == 0 && (end || (!only_end && (s[i] == "else" || s[i].starts_with("elif "))))) return i;
    if (end) --depth;
  }
  return i;
}

/// The branches that are left when the conditions of `rules` are decided. @returns nullopt for blocks that do not close.
std::optional<Statements> decide(const Statements& s, std::span<const Decided> rules) {
  std::vector<bool> gone(s.size(), false);
  const auto drop = [&](std::size_t from, std::size_t to) {
    for (std::size_t k = from; k < to; ++k) gone[k] = true;
  };
  for (std::size_t i = 0; i < s.size(); ++i) {
    const bool first = s[i].starts_with("if "), later = s[i].starts_with("elif ");
    if (gone[i] || !(first || later)) continue;
    const std::string_view condition = std::string_view(s[i]).substr(first ? 3 : 5);
    const std::size_t branch = next_branch(s, i, false), end = next_branch(s, i, true);
    if (end >= s.size()) return std::nullopt;
    const auto applies = [&](const Decided& rule) {
      return rule.condition == condition &&
             (rule.only_body.empty() || (branch == end && end == i + 2 && s[i + 1] == rule.only_body));
    };
    const auto rule = std::find_if(rules.begin(), rules.end(), applies);
    if (rule == rules.end()) continue;
    if (later) {
      if (rule->holds) return std::nullopt;
      drop(i, branch);
    } else if (rule->holds) {
      gone[i] = true;
      drop(branch, end + 1);
    } else if (branch == end) {
      drop(i, end + 1);
    } else if (s[branch] == "else") {
      drop(i, branch + 1);
      gone[end] = true;
    } else {
      return std::nullopt;
    }
  }
  Statements out;
  for (std::size_t i = 0; i < s.size(); ++i) {
    if (!gone[i]) out.push_back(s[i]);
  }
  return out;
}

}  // namespace

std::optional<Statements> without_builtin_tools(Statements statements) {
  for (std::string& statement : statements) {
    if (statement == "if builtin_tools is defined or tools is not none") statement = "if tools is not none";
  }
  return decide(statements, kAlways);
}

std::optional<Statements> without_tools(Statements statements) {
  for (std::string& statement : statements) {
    if (statement == "if add_generation_prompt and not ns . is_tool") statement = "if add_generation_prompt";
    if (statement == R"(if message . role == "assistant" and message . content is not none)")
      statement = R"(if message . role == "assistant")";
  }
  return decide(statements, kWithoutTools);
}

}  // namespace qlorapp
