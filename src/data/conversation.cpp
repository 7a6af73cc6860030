// SPDX-License-Identifier: Apache-2.0
#include "conversation.hpp"

#include <array>
#include <string_view>
#include <utility>

#include "core/check.hpp"
#include "text/unicode.hpp"

namespace qlorapp {
namespace {

struct Speaker {
  std::string_view from, role;
};
constexpr std::string_view kCall = "function_call";
constexpr std::array<Speaker, 12> kSpeakers{{{"human", "user"},
                                             {"user", "user"},
                                             {"gpt", "assistant"},
                                             {"assistant", "assistant"},
                                             {"model", "assistant"},
                                             {"chatgpt", "assistant"},
                                             {"bing", "assistant"},
                                             {"system", "system"},
                                             {kCall, "assistant"},
                                             {"observation", "tool"},
                                             {"tool", "tool"},
                                             {"function_response", "tool"}}};

bool is_empty(const Row& row, const char* key) {
  const auto found = row.find(key);
  return found == row.end() || found->is_null() || (found->is_string() && found->get_ref<const std::string&>().empty()) ||
         (found->is_structured() && found->empty());
}

/// OpenAI's rows hold the arguments of a call as JSON text. Servers pass the object to templates.
void decode_arguments(Row& message_row, const std::string& where) {
  const auto calls = message_row.find("tool_calls");
  if (calls == message_row.end() || !calls->is_array()) return;
  for (Row& entry : *calls) {
    Row& call = entry.is_object() && entry.contains("function") ? entry["function"] : entry;
    if (!call.is_object() || !call.contains("arguments") || !call["arguments"].is_string()) continue;
    const std::string text = call["arguments"].get<std::string>();
    Row arguments = unicode::strip(text).empty() ? Row::object() : parse_row(text, message("{}, 'arguments'", where));
    QLORAPP_CHECK_FORMAT(
        arguments.is_object(),
        "[{}] the arguments of a tool call must be a JSON object, or the text of one; got the text of {}. Correct or "
        "remove the row.",
        where, kind_of(arguments));
    call["arguments"] = std::move(arguments);
  }
}

/// One call, or a list of calls, as [{"type": "function", "function": {"name", "arguments"}}].
Row tool_calls_of(const std::string& text, const std::string& where) {
  Row calls = parse_row(text, message("{}, 'function_call'", where));
  if (calls.is_object()) calls = Row::array({std::move(calls)});
  QLORAPP_CHECK_FORMAT(
      calls.is_array() && !calls.empty(),
      "[{}] the value of a function_call must be JSON of a call or a list of calls; got {}. Correct or remove the row.", where,
      kind_of(calls));
  Row out = Row::array();
  for (Row& call : calls) {
    QLORAPP_CHECK_FORMAT(call.is_object() && call.contains("name"),
                         "[{}] a call must be {{\"name\", \"arguments\"}}; got {}. Correct or remove the row.", where,
                         call.is_object() ? "no name" : kind_of(call));
    Row entry = Row::object();
    entry["type"] = "function";
    entry["function"] = std::move(call);
    out.push_back(std::move(entry));
  }
  return out;
}

/// {"from", "value"} as {"role", "content"}. Other keys stay behind them.
Row from_sharegpt(const Row& entry, const std::string& where) {
  const std::string& from = require_text(entry, "from", where);
  const Speaker* speaker = nullptr;
  std::string known;
  for (const Speaker& one : kSpeakers) {
    if (one.from == from) speaker = &one;
    known += message("{}{}", known.empty() ? "" : ", ", one.from);
  }
  QLORAPP_CHECK_FORMAT(speaker != nullptr, "[{}] 'from' must be one of {}; got '{}'. Correct or remove the row.", where, known,
                       from.substr(0, 80));
  const std::string& value = require_text(entry, "value", where);
  Row out = Row::object();
  out["role"] = speaker->role;
  out["content"] = speaker->from == kCall ? "" : value;
  if (speaker->from == kCall) out["tool_calls"] = tool_calls_of(value, where);
  for (const auto& [key, other] : entry.items()) {
    if (key != "from" && key != "value" && !other.is_null()) out[key] = other;
  }
  return out;
}

Row without_nulls(Row entry) {
  for (auto item = entry.begin(); item != entry.end();) item = item->is_null() ? entry.erase(item) : std::next(item);
  return entry;
}

}  // namespace

bool is_conversation(const Row& value) {
  return value.is_object() || (value.is_array() && !value.empty() && value.front().is_object());
}

bool is_sharegpt(const Row& value) { return is_conversation(value) && (value.is_array() ? value.front() : value).contains("from"); }

Row canonical_messages(Row value, const std::string& name, const std::string& where) {
  if (value.is_object()) value = Row::array({std::move(value)});
  QLORAPP_CHECK_FORMAT(value.is_array(), "[{}] '{}' must be a list; got {}. Correct or remove the row.", where, name,
                       kind_of(value));
  for (Row& entry : value) {
    QLORAPP_CHECK_FORMAT(entry.is_object(), "[{}] a message in '{}' must be a JSON object; got {}. Correct or remove the row.",
                         where, name, kind_of(entry));
    entry = entry.contains("from") && !entry.contains("role") ? from_sharegpt(entry, where) : without_nulls(std::move(entry));
    decode_arguments(entry, where);
  }
  return value;
}

void take_tools(Row& row, bool sharegpt, Row& into, const std::string& where) {
  for (const char* key : {"tools", "functions"}) {
    if (is_empty(row, key)) continue;
    Row tools = std::move(row[key]);
    if (tools.is_string()) tools = parse_row(tools.get_ref<const std::string&>(), message("{}, '{}'", where, key));
    if (tools.is_null()) continue;
    QLORAPP_CHECK_FORMAT(tools.is_array(), "[{}] '{}' must be a list of tools; got {}. Write a list, or remove the key.", where,
                         key, kind_of(tools));
    for (Row& tool : tools) {
      if (!sharegpt || !tool.is_object() || !tool.contains("name") || tool.contains("function")) continue;
      Row wrapped = Row::object();
      wrapped["type"] = "function";
      wrapped["function"] = std::move(tool);
      tool = std::move(wrapped);
    }
    if (!tools.empty()) into[key] = std::move(tools);
  }
}

void put_system(const Row& row, Row& messages, const std::string& where) {
  if (is_empty(row, "system")) return;
  const std::string& system = require_text(row, "system", where);
  if (!messages.empty() && messages.front().contains("role") && messages.front()["role"] == "system") return;
  Row message = Row::object();
  message["role"] = "system";
  message["content"] = system;
  messages.insert(messages.begin(), std::move(message));
}

}  // namespace qlorapp
