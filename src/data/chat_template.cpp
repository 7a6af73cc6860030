// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/data/chat_template.hpp"

#include <array>
#include <utility>

#include "json_reading.hpp"
#include "qlorapp/core/check.hpp"
#include "qlorapp/core/nearest_name.hpp"
#include "qlorapp/format/folder.hpp"
#include "template_source.hpp"
#include "unicode.hpp"

namespace qlorapp {
namespace {

constexpr size_t kLargestTemplate = 64 << 10;
constexpr size_t kLargestConfig = 64 << 20;
constexpr std::string_view kDefaultDate = "26 Jul 2024";
constexpr std::array<std::string_view, 3> kNames{"llama3", "llama3.1", "chatml"};

/// Meta-Llama-3-8B-Instruct.
constexpr std::string_view kLlama3 =
    R"({% set loop_messages = messages %}{% for message in loop_messages %})"
    R"({% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %})"
    R"({% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %})"
    R"({% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %})";

/// Llama-3.1 and 3.2 Instruct, what a conversation without tools reaches. They differ in where the date comes from.
constexpr std::string_view kDate31 = R"({% if not date_string is defined %}{% set date_string = "26 Jul 2024" %}{% endif %})";
constexpr std::string_view kDate32 =
    R"({% if not date_string is defined %}{% if strftime_now is defined %}{% set date_string = strftime_now("%d %b %Y") %})"
    R"({% else %}{% set date_string = "26 Jul 2024" %}{% endif %}{% endif %})";
constexpr std::string_view kLlama31 =
    R"({% if messages[0]['role'] == 'system' %}{% set system_message = messages[0]['content']|trim %}{% set messages = messages[1:] %})"
    R"({% else %}{% set system_message = "" %}{% endif %}{{ "<|start_header_id|>system<|end_header_id|>\n\n" }})"
    R"({{ "Cutting Knowledge Date: December 2023\n" }}{{ "Today Date: " + date_string + "\n\n" }}{{ system_message }}{{ "<|eot_id|>" }})"
    R"({% for message in messages %}{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim }})"
    R"({{ '<|eot_id|>' }}{% endfor %})"
    R"({% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %})";

/// ChatML; with {SYSTEM}, the message that stands where a conversation begins without one (Qwen, SmolLM).
constexpr std::string_view kChatMlBegin = R"({% for message in messages %})";
constexpr std::string_view kChatMlSystem =
    R"({% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n{SYSTEM}<|im_end|>\n' }}{% endif %})";
constexpr std::string_view kChatMlEnd =
    R"({{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}{% endfor %})"
    R"({% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %})";

using Statements = std::vector<std::string>;

Statements statements_of(std::initializer_list<std::string_view> parts) {
  std::string source;
  for (const auto part : parts) source += part;
  return template_statements(source).value();
}

/// Equal, but for one stretch of `pattern` spelt {SYSTEM}. @returns what stands there, without its escapes.
std::optional<std::string> match_with_hole(const Statements& statements, const Statements& pattern) {
  constexpr std::string_view kHole = "{SYSTEM}";
  if (statements.size() != pattern.size()) return std::nullopt;
  std::optional<std::string> found;
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    if (statements[i] == pattern[i]) continue;
    const auto hole = pattern[i].find(kHole);
    if (hole == std::string::npos) return std::nullopt;
    const std::string_view before = std::string_view(pattern[i]).substr(0, hole);
    const std::string_view after = std::string_view(pattern[i]).substr(hole + kHole.size());
    std::string_view text = statements[i];
    if (text.size() < before.size() + after.size() || !text.starts_with(before) || !text.ends_with(after)) return std::nullopt;
    text = text.substr(before.size(), text.size() - before.size() - after.size());
    found.emplace();
    for (std::size_t k = 0; k < text.size(); ++k) {
      if (text[k] == '"') return std::nullopt;  // the string ends here: more than text stands in the hole
      if (text[k] == '\\' && k + 1 < text.size()) ++k;
      *found += text[k];
    }
  }
  return found;
}

struct Known {
  ChatTemplate::Kind kind;
  Statements statements;
};

const std::vector<Known>& known_templates() {
  static const std::vector<Known> known{
      {ChatTemplate::Kind::kLlama3, statements_of({kLlama3})},
      {ChatTemplate::Kind::kLlama31, statements_of({"{{ bos_token }}", kDate31, kLlama31})},
      {ChatTemplate::Kind::kLlama31, statements_of({"{{ bos_token }}", kDate32, kLlama31})},
      {ChatTemplate::Kind::kChatMl, statements_of({kChatMlBegin, kChatMlEnd})},
  };
  return known;
}

/// chat_template of tokenizer_config.json: a string, or a list of named ones of which "default" counts.
std::optional<std::string> template_in(const nlohmann::json& config, const std::string& where) {
  const auto entry = config.find("chat_template");
  if (entry == config.end() || entry->is_null()) return std::nullopt;
  if (entry->is_string()) return entry->get<std::string>();
  if (entry->is_array()) {
    for (const auto& named : *entry) {
      if (named.is_object() && named.value("name", nlohmann::json()) == "default" && named.contains("template") &&
          named["template"].is_string()) {
        return named["template"].get<std::string>();
      }
    }
  }
  throw FormatError(concat("[", where, "] chat_template must be a string or a list with one named default; got ", kind_of(*entry),
                           ". Take the file from the model again."));
}

std::string bos_in(const nlohmann::json& config) {
  const auto entry = config.find("bos_token");
  if (entry == config.end()) return {};
  if (entry->is_string()) return entry->get<std::string>();
  if (entry->is_object() && entry->contains("content") && (*entry)["content"].is_string())
    return (*entry)["content"].get<std::string>();
  return {};
}

}  // namespace

std::optional<ChatTemplate> ChatTemplate::from_folder(const std::string& folder) {
  const std::string config_path = format::path_in(folder, "tokenizer_config.json");
  const std::string jinja_path = format::path_in(folder, "chat_template.jinja");
  nlohmann::json config = nlohmann::json::object();
  if (format::exists(config_path)) config = parse_json(read_file(config_path, kLargestConfig), config_path);
  QLORAPP_CHECK_FORMAT(config.is_object(), "[", config_path, "] must be a JSON object; got ", kind_of(config), ". Check the file.");
  if (format::exists(jinja_path)) { return from_source(read_file(jinja_path, kLargestTemplate), bos_in(config), jinja_path); }
  const auto jinja = template_in(config, config_path);
  if (!jinja) return std::nullopt;
  return from_source(*jinja, bos_in(config), config_path);
}

ChatTemplate ChatTemplate::from_source(std::string_view jinja, std::string bos_token, const std::string& where) {
  if (jinja.size() <= kLargestTemplate) {
    if (const auto statements = template_statements(jinja)) {
      for (const Known& known : known_templates()) {
        if (known.statements == *statements) return {known.kind, std::move(bos_token)};
      }
      static const Statements with_system = statements_of({kChatMlBegin, kChatMlSystem, kChatMlEnd});
      if (auto system = match_with_hole(*statements, with_system)) {
        ChatTemplate out(Kind::kChatMl, std::move(bos_token));
        out.default_system_ = std::move(system);
        return out;
      }
    }
  }
  throw FormatError(concat("[", where,
                           "] the chat template must be that of Llama 3, Llama 3.1/3.2 or ChatML; got another one, and "
                           "templates are compared here, never run. Use qlorapp from Python, where the tokenizer renders its own "
                           "template, or choose one by name: ",
                           kNames, "."));
}

ChatTemplate ChatTemplate::named(std::string_view name, std::string bos_token) {
  if (name == kNames[0]) return {Kind::kLlama3, std::move(bos_token)};
  if (name == kNames[1]) return {Kind::kLlama31, std::move(bos_token)};
  if (name == kNames[2]) return {Kind::kChatMl, std::move(bos_token)};
  throw ValueError(concat("[chat_template] must be one of ", kNames, "; got '", name, "'.", did_you_mean(name, kNames)));
}

std::string_view ChatTemplate::name() const { return kNames[static_cast<std::size_t>(kind_)]; }

std::string_view ChatTemplate::end_of_turn() const { return kind_ == Kind::kChatMl ? "<|im_end|>" : "<|eot_id|>"; }

RenderedChat ChatTemplate::render(std::span<const Message> messages, const ChatOptions& options) const {
  QLORAPP_CHECK_VALUE(!messages.empty(),
                      "[chat_template] a conversation must have a message; got none. Add one, or remove the row.");
  static constexpr std::array<std::string_view, 3> kRoles{"system", "user", "assistant"};
  for (const Message& message : messages) {
    QLORAPP_CHECK_VALUE(message.role == kRoles[0] || message.role == kRoles[1] || message.role == kRoles[2],
                        "[chat_template] a role must be one of ", kRoles, "; got '", message.role,
                        "'. Rename it; tool calls are rendered from Python only.", did_you_mean(message.role, kRoles));
  }
  RenderedChat out;
  if (kind_ == Kind::kChatMl) {
    render_chatml(messages, out);
    if (options.add_generation_prompt) out.text += "<|im_start|>assistant\n";
  } else {
    render_llama(messages, options, out);
    if (options.add_generation_prompt) out.text += "<|start_header_id|>assistant<|end_header_id|>\n\n";
  }
  return out;
}

void ChatTemplate::render_llama(std::span<const Message> messages, const ChatOptions& options, RenderedChat& out) const {
  out.text = bos_token_;
  const auto turn = [&](const std::string& role, std::string_view preface, std::string_view content) {
    out.text += concat("<|start_header_id|>", role, "<|end_header_id|>\n\n", preface);
    const std::size_t begin = out.text.size();
    out.text += unicode::strip(content);
    const std::size_t end = out.text.size();
    out.text += "<|eot_id|>";
    return Turn{role, {begin, end}, out.text.size()};
  };
  if (kind_ == Kind::kLlama31) {  // always has a system turn, which holds the date
    const bool given = messages.front().role == "system";
    const std::string date = options.date_string.value_or(std::string(kDefaultDate));
    const Turn system = turn("system", concat("Cutting Knowledge Date: December 2023\nToday Date: ", date, "\n\n"),
                             given ? std::string_view(messages.front().content) : std::string_view());
    if (given) {
      out.turns.push_back(system);
      messages = messages.subspan(1);
    }
  }
  for (const Message& message : messages) out.turns.push_back(turn(message.role, "", message.content));
}

void ChatTemplate::render_chatml(std::span<const Message> messages, RenderedChat& out) const {
  if (default_system_ && messages.front().role != "system") {
    out.text += concat("<|im_start|>system\n", *default_system_, "<|im_end|>\n");
  }
  for (const Message& message : messages) {
    out.text += concat("<|im_start|>", message.role, "\n");
    const std::size_t begin = out.text.size();
    out.text += message.content;
    const std::size_t end = out.text.size();
    out.text += "<|im_end|>";
    out.turns.push_back({message.role, {begin, end}, out.text.size()});
    out.text += "\n";
  }
}

}  // namespace qlorapp
