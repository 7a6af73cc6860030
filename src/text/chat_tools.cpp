// SPDX-License-Identifier: Apache-2.0
#include "chat_tools.hpp"

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "json/python_json.hpp"
#include "qlorapp/json/json.hpp"
#include "template_sources.hpp"

namespace qlorapp {
namespace {

using format::Json;

/// As the filter tojson of transformers writes it.
std::string to_json(const Json& value, int indent = -1) {
  return format::dump_python_json(value, {.indent = indent, .sort_keys = false, .ensure_ascii = false});
}

Json rest_of(const Message& message) {
  return message.rest.empty() ? Json::object() : format::parse_json(message.rest, "chat_template", {.allow_big_integers = true});
}

bool there(const Json& object, const char* key) { return object.contains(key) && !object[key].is_null() && !object[key].empty(); }

Json tools_of(const std::string& tools) {
  Json list = format::parse_json(tools, "chat_template", {.allow_big_integers = true});
  QLORAPP_CHECK_VALUE(list.is_array(), "[chat_template] 'tools' must be a list of tools; got {}. Write a list, or remove the key.",
                      list.type_name());
  return list;
}

}  // namespace

bool uses_tools(std::span<const Message> messages, const ChatOptions& options) {
  if (!options.tools.empty()) return true;
  for (const Message& message : messages) {
    if (message.role == "tool" || message.role == "ipython") return true;
    if (message.rest.empty()) continue;
    const Json rest = rest_of(message);
    for (const char* key : {"tool_calls", "function_call", "tools"}) {
      if (there(rest, key)) return true;
    }
  }
  return false;
}

std::vector<ToolCall> tool_calls_of(const Message& message, ToolStyle style) {
  const Json rest = rest_of(message);
  QLORAPP_CHECK_VALUE(!there(rest, "function_call"),
                      "[chat_template] tool calls must be in 'tool_calls'; got 'function_call'. Write \"tool_calls\": "
                      "[{{\"function\": {{\"name\", \"arguments\"}}}}].");
  if (!there(rest, "tool_calls")) return {};
  QLORAPP_CHECK_VALUE(style != ToolStyle::kNone && !there(rest, "tools") && message.role == "assistant",
                      "[chat_template] {}; a message of role '{}' has tool calls. Remove the row, or choose another template.",
                      message.role == "assistant" ? "this template does not write tool calls, so they would be lost"
                                                  : "only the assistant may call tools",
                      message.role);
  const Json& list = rest["tool_calls"];
  QLORAPP_CHECK_VALUE(list.is_array(), "[chat_template] 'tool_calls' must be a list; got {}. Correct the row.", list.type_name());
  std::vector<ToolCall> calls;
  for (const Json& entry : list) {
    const Json& call = entry.is_object() && there(entry, "function") ? entry["function"] : entry;
    QLORAPP_CHECK_VALUE(call.is_object() && call.contains("name") && call["name"].is_string() && call.contains("arguments"),
                        "[chat_template] a tool call must have 'name' and 'arguments'; got {}. Correct the row.",
                        to_json(call).substr(0, 80));
    const Json& arguments = call["arguments"];
    const bool as_it_is = style == ToolStyle::kHermes3 && arguments.is_string();
    calls.push_back({call["name"].get<std::string>(), as_it_is ? arguments.get<std::string>() : to_json(arguments)});
  }
  QLORAPP_CHECK_VALUE(style != ToolStyle::kLlama31 || calls.size() == 1,
                      "[chat_template] llama3.1 writes one tool call per message; got {}. Split the message.", calls.size());
  return calls;
}

std::string hermes_tools(const std::string& tools, bool behind) {
  std::string out = behind ? "\n\n" : "";
  out += kHermesBefore;
  for (const Json& tool : tools_of(tools)) out += "\n" + to_json(tool);
  return out += kHermesBehind;
}

std::string llama31_tools(const std::string& tools) {
  std::string out = message("{}{}", kLlama31Before, kLlama31Format);
  for (const Json& tool : tools_of(tools)) out += to_json(tool, 4) + "\n\n";
  return out;
}

std::string written_calls(const std::vector<ToolCall>& calls, std::string_view content, ToolStyle style) {
  if (style == ToolStyle::kLlama31) {  // other text of the message is not written
    return message("{{\"name\": \"{}\", \"parameters\": {}}}", calls.front().name, calls.front().arguments);
  }
  std::string out(content);
  for (const ToolCall& call : calls) {
    if (!out.empty()) out += "\n";
    out += message("<tool_call>\n{{\"name\": \"{}\", \"arguments\": {}}}\n</tool_call>", call.name, call.arguments);
  }
  return out;
}

std::string json_text(std::string_view text) { return to_json(Json(std::string(text))); }

std::optional<std::string> reasoning_of(const Message& message) {
  const Json rest = rest_of(message);
  const auto found = rest.find("reasoning_content");
  return found != rest.end() && found->is_string() ? std::optional(found->get<std::string>()) : std::nullopt;
}

}  // namespace qlorapp
