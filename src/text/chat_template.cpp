// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/text/chat_template.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <utility>

#include "chat_renderer.hpp"
#include "core/check.hpp"
#include "core/nearest_name.hpp"
#include "files/folder.hpp"
#include "jinja/template.hpp"
#include "json_reading.hpp"
#include "named_templates.hpp"
#include "special_tokens.hpp"
#include "unicode.hpp"

namespace qlorapp {
namespace {

constexpr size_t kLargestTemplateFile = 4 << 20;

struct Named {
  std::string_view name;
  std::string source;
};

const std::vector<Named>& named_templates() {
  static const std::vector<Named> all{
      {"llama2", sources::llama2()},
      {"llama3", sources::llama3()},
      {"llama3.1", sources::llama31()},
      {"chatml", sources::chatml()},
      {"qwen2.5", sources::qwen25()},
      {"qwen3", sources::qwen3()},
      {"qwen3-instruct", sources::qwen3_instruct()},
      {"mistral", sources::mistral_v1()},
      {"mistral-v3", sources::mistral_v3("[INST] ", "' ' + message['content'] | trim")},
      {"mistral-v3-tekken", sources::mistral_v3("[INST]", "message['content']")},
      {"mistral-v7", sources::mistral_v7()},
      {"gemma", sources::gemma()},
      {"gemma3", sources::gemma3()},
      {"phi3", sources::phi3()},
      {"phi4", sources::phi4()},
      {"phi4-mini", sources::phi4_mini()},
      {"granite", sources::granite()},
      {"cohere", sources::cohere()},
      {"olmo2", sources::tulu(true)},
      {"tulu", sources::tulu(false)},
      {"exaone3.5", sources::exaone()},
      {"deepseek-r1-distill", sources::deepseek_distill()},
      {"zephyr", sources::zephyr()},
      {"alpaca", sources::alpaca()},
  };
  return all;
}

bool is_in_name(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }

/// Whether a template looks at a key: by an attribute or by a string.
bool names_key(std::string_view jinja, std::string_view key) {
  for (std::size_t at = jinja.find(key); at != std::string_view::npos; at = jinja.find(key, at + 1)) {
    const char before = at > 0 ? jinja[at - 1] : ' ', behind = at + key.size() < jinja.size() ? jinja[at + key.size()] : ' ';
    if (before == '.' ? !is_in_name(behind) : (before == '\'' || before == '"') && behind == before) return true;
  }
  return false;
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
  throw FormatError(
      message("[{}] chat_template must be a string or a list with one named default; got {}. Copy the file from the model again.",
              where, kind_of(*entry)));
}

/// bos_token or eos_token; "" where no file names it.
std::string token_in(const nlohmann::json& config, const char* key) {
  const auto entry = config.find(key);
  if (entry == config.end()) return {};
  if (entry->is_string()) return entry->get<std::string>();
  const bool has_content = entry->is_object() && entry->contains("content") && (*entry)["content"].is_string();
  return has_content ? (*entry)["content"].get<std::string>() : std::string();
}

/// The variables of a template that name a special token, as transformers gives them.
jinja::Dict tokens_of(const nlohmann::json& config) {
  jinja::Dict out;
  for (const char* const key : {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"}) {
    std::string token = token_in(config, key);
    if (!token.empty()) out.entries.emplace_back(key, std::move(token));
  }
  return out;
}

}  // namespace

ChatTemplate::ChatTemplate(std::string_view jinja, jinja::Dict tokens, const std::string& where) {
  QLORAPP_CHECK_FORMAT(
      tokens.find("eos_token") != nullptr || jinja.find("eos_token") == std::string_view::npos,
      "[{}] tokenizer_config.json must name eos_token, because the chat template writes it; it does not. Add it there.", where);
  std::vector<std::string> specials;
  for (const auto& [key, token] : tokens.entries) specials.push_back(*token.text());
  parts_ = std::make_shared<const Parts>(
      Parts{jinja::Template(jinja, where), std::string(jinja), std::move(tokens), std::move(specials)});
}

std::optional<ChatTemplate> ChatTemplate::from_folder(const std::string& folder) {
  const TokenizerConfig config = read_tokenizer_config(folder);
  const std::string jinja_path = files::path_in(folder, "chat_template.jinja");
  if (files::has_entry(folder, "chat_template.jinja"))
    return ChatTemplate(read_file_inside(jinja_path, kLargestTemplateFile), tokens_of(config.values), jinja_path);
  const auto jinja = template_in(config.values, config.path);
  if (!jinja) return std::nullopt;
  return ChatTemplate(*jinja, tokens_of(config.values), config.path);
}

namespace {

bool is_file(const std::string& name_or_file) {
  return name_or_file.ends_with(".jinja") || name_or_file.find('/') != std::string::npos;
}

const std::string& source_of(std::string_view name) {
  for (const Named& one : named_templates()) {
    if (one.name == name) return one.source;
  }
  throw ValueError(message("[chat_template] must be one of {}, or the path of a .jinja file; got '{}'.{}",
                           joined(ChatTemplate::names()), name, did_you_mean(name, ChatTemplate::names())));
}

}  // namespace

std::string ChatTemplate::source(const std::string& name_or_file) {
  return is_file(name_or_file) ? read_file(name_or_file, kLargestTemplateFile) : source_of(name_or_file);
}

bool ChatTemplate::is_in(const std::string& folder) {
  if (files::has_entry(folder, "chat_template.jinja")) return true;
  const TokenizerConfig config = read_tokenizer_config(folder);
  return template_in(config.values, config.path).has_value();
}

ChatTemplate ChatTemplate::choose(const std::string& name_or_file, const std::string& folder) {
  const TokenizerConfig config = read_tokenizer_config(folder);
  const std::string jinja = source(name_or_file);
  return {jinja, tokens_of(config.values), is_file(name_or_file) ? name_or_file : config.path};
}

ChatTemplate ChatTemplate::from_source(std::string_view jinja, const std::map<std::string, std::string>& tokens,
                                       const std::string& where) {
  jinja::Dict variables;
  for (const auto& [key, token] : tokens) variables.set(key, token);
  return {jinja, std::move(variables), where};
}

ChatTemplate ChatTemplate::named(std::string_view name, const std::string& bos_token, const std::string& eos_token) {
  return from_source(source_of(name), {{"bos_token", bos_token}, {"eos_token", eos_token}}, "chat_template");
}

std::span<const std::string_view> ChatTemplate::names() {
  static const std::vector<std::string_view> names = [] {
    std::vector<std::string_view> out;
    for (const Named& one : named_templates()) out.push_back(one.name);
    return out;
  }();
  return names;
}

ChatTemplate ChatTemplate::with_special_tokens(std::span<const std::string> tokens) const {
  ChatTemplate out = *this;
  auto parts = std::make_shared<Parts>(*parts_);
  parts->specials.insert(parts->specials.end(), tokens.begin(), tokens.end());
  out.parts_ = std::move(parts);
  return out;
}

bool ChatTemplate::reads_key(std::string_view key) const {
  if (names_key(parts_->source, key)) return true;
  // If the answer's header opens a thought, the thoughts are written into the answer (ChatRenderer::answer_behind_opening()).
  const auto header = parts_->source.rfind("add_generation_prompt");
  return key == "reasoning_content" && header != std::string::npos && parts_->source.find("<think>", header) != std::string::npos;
}

std::string joined_parts(std::span<const std::string> parts) {
  std::string out;
  for (std::size_t i = 0; i < parts.size(); ++i) out += (i > 0 ? "\n" : "") + parts[i];
  return out;
}

const std::string& ChatTemplate::jinja() const { return parts_->source; }

std::optional<std::string> ChatTemplate::end_of_turn() const { return end_of_answer(*parts_); }

RenderedChat ChatTemplate::render(std::span<const Message> messages, const ChatOptions& options) const {
  QLORAPP_CHECK_VALUE(!messages.empty(),
                      "[chat_template] a conversation must have a message; got none. Add one, or remove the row.");
  const auto is_text = [](std::string_view text) { return unicode::first_invalid_utf8(text) == std::string_view::npos; };
  for (const Message& one : messages) {
    QLORAPP_CHECK_VALUE(
        is_text(one.role) && is_text(one.content) && is_text(one.rest) && std::all_of(one.parts.begin(), one.parts.end(), is_text),
        "[chat_template] text must be UTF-8; got other bytes in a message of '{}'. Convert it.",
        is_text(one.role) ? one.role : "?");
  }
  constexpr std::array<std::string_view, 5> kRoles{"system", "user", "assistant", "tool", "ipython"};
  for (const Message& one : messages) {
    // Many templates write any role, and others leave the message out: a wrong one would not be noticed.
    const bool known = std::find(kRoles.begin(), kRoles.end(), one.role) != kRoles.end() || names_key(parts_->source, one.role);
    QLORAPP_CHECK_VALUE(
        known,
        "[chat_template] a role must be one of {}, or one that the chat template names; got '{}'. Rename it, or remove "
        "the row.{}",
        joined(kRoles), one.role, did_you_mean(one.role, kRoles, 2));
  }
  return ChatRenderer(*parts_, messages, options).render();
}

}  // namespace qlorapp
