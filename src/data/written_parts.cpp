// SPDX-License-Identifier: Apache-2.0
#include "written_parts.hpp"

#include <algorithm>
#include <array>
#include <functional>
#include <utility>

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "row_message.hpp"
#include "text/unicode.hpp"

namespace qlorapp {
namespace {

constexpr std::array<std::string_view, 2> kTags{"<think>", "</think>"};

}  // namespace

MarkedChat::MarkedChat(std::span<const Message> messages, const std::string& tools) {
  const auto holds_base = [&](const std::string& text) { return text.find(base_) != std::string::npos; };
  const auto message_holds_base = [&](const Message& message) {
    return holds_base(message.content) || holds_base(message.rest) ||
           std::any_of(message.parts.begin(), message.parts.end(), holds_base);
  };
  while (holds_base(tools) || std::any_of(messages.begin(), messages.end(), message_holds_base))
    base_ += base_.size() % 7 ? 'k' : 'v';
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const Message& message = messages[i];
    Message copy{message.role, {}, {}, {}};
    for (const std::string& part : message.parts) copy.parts.push_back(marked_content(part, i));
    copy.content = message.parts.empty() ? marked_content(message.content, i) : joined_parts(copy.parts);
    if (!message.rest.empty()) copy.rest = marked_rest(message.rest, i);
    messages_.push_back(std::move(copy));
  }
  if (!tools.empty()) tools_ = marked_tools(tools);
}

std::string MarkedChat::mark_of(std::size_t part) const { return message("{}{}z", base_, part); }

std::string MarkedChat::marked(std::string_view text, std::size_t message, std::string_view what) {
  const std::string_view said = unicode::strip(text);
  if (said.empty()) return std::string(text);
  auto at = static_cast<std::size_t>(said.data() - text.data()) + said.size() / 2;
  while ((static_cast<uint8_t>(text[at]) & 0xC0) == 0x80) --at;  // to the start of a character
  std::string out(text);
  out.insert(at, mark_of(parts_.size()));
  parts_.push_back({message, std::string(what), std::string(said)});
  return out;
}

std::string MarkedChat::marked_content(std::string_view content, std::size_t message) {
  std::string out;
  while (!content.empty()) {
    std::size_t at = std::string_view::npos;
    std::string_view tag;
    for (const std::string_view one : kTags) {
      if (const std::size_t found = content.find(one); found < at) {
        at = found;
        tag = one;
      }
    }
    out += marked(content.substr(0, at), message, tag == kTags[1] ? "thoughts" : "content");
    out += tag;
    content.remove_prefix(at == std::string_view::npos ? content.size() : at + tag.size());
  }
  return out;
}

std::string MarkedChat::marked_rest(const std::string& text, std::size_t message) {
  using Json = nlohmann::ordered_json;
  Json rest = Json::parse(text);
  for (auto& [key, value] : rest.items()) {
    if (holds_thoughts(key) && value.is_string()) value = marked(value.get<std::string>(), message, key);
  }
  const std::function<void(Json&)> mark_texts = [&](Json& value) {
    if (value.is_string()) value = marked(value.get<std::string>(), message, "tool call");
    else if (value.is_structured())
      for (Json& inside : value) mark_texts(inside);
  };
  const auto mark_call = [&](Json& entry) {
    Json& call = entry.is_object() && entry.contains("function") ? entry["function"] : entry;
    for (const char* key : {"name", "arguments"}) {
      if (call.is_object() && call.contains(key)) mark_texts(call[key]);
    }
  };
  if (rest.contains("function_call")) mark_call(rest["function_call"]);
  const auto calls = rest.find("tool_calls");
  if (calls != rest.end() && calls->is_array()) std::for_each(calls->begin(), calls->end(), mark_call);
  return rest.dump();
}

std::string MarkedChat::marked_tools(const std::string& text) {
  using Json = nlohmann::ordered_json;
  Json tools = Json::parse(text);
  if (!tools.is_array()) return text;
  for (Json& entry : tools) {
    Json& tool = entry.is_object() && entry.contains("function") ? entry["function"] : entry;
    if (!tool.is_object()) continue;
    for (const char* key : {"description", "name"}) {  // a template may compare names
      if (!tool.contains(key) || !tool[key].is_string() || tool[key].get_ref<const std::string&>().empty()) continue;
      tool[key] = marked(tool[key].get<std::string>(), messages_.size(), "tool");
      break;
    }
  }
  return tools.dump();
}

void MarkedChat::look(std::string_view text) {
  for (std::size_t at = text.find(base_); at != std::string_view::npos; at = text.find(base_, at + 1)) {
    std::size_t part = 0;
    for (std::size_t i = at + base_.size(); i < text.size() && text[i] >= '0' && text[i] <= '9' && part < parts_.size(); ++i) {
      part = 10 * part + static_cast<std::size_t>(text[i] - '0');
    }
    if (part < parts_.size() && text.substr(at).starts_with(mark_of(part))) parts_[part].written = true;
  }
}

bool MarkedChat::holds(std::string_view text, std::size_t part) const { return text.find(mark_of(part)) != std::string_view::npos; }

}  // namespace qlorapp
