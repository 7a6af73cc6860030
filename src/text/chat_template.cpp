// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/text/chat_template.hpp"

#include <algorithm>
#include <utility>

#include "chat_form.hpp"
#include "chat_writer.hpp"
#include "core/check.hpp"
#include "core/nearest_name.hpp"
#include "files/folder.hpp"
#include "json_reading.hpp"
#include "special_tokens.hpp"
#include "template_source.hpp"
#include "unicode.hpp"
#include "unsupported.hpp"

namespace qlorapp {
namespace {

constexpr size_t kLargestTemplate = 64 << 10;  // a larger one is none that is known here
constexpr size_t kLargestTemplateFile = 4 << 20;
constexpr size_t kLargestSource = 16 << 20;  // of templates that transformers renders
constexpr std::string_view kHole = "{SYSTEM}";

/// The text that stands for the hole of a statement, without its escapes; "" for equal statements without one.
std::optional<std::string> fill_of_hole(std::string_view statement, std::string_view pattern) {
  const auto hole = pattern.find(kHole);
  if (hole == std::string_view::npos) return std::nullopt;
  const std::string_view before = pattern.substr(0, hole), after = pattern.substr(hole + kHole.size());
  if (statement.size() < before.size() + after.size() || !statement.starts_with(before) || !statement.ends_with(after))
    return std::nullopt;
  const std::string_view text = statement.substr(before.size(), statement.size() - before.size() - after.size());
  std::string out;
  for (std::size_t k = 0; k < text.size(); ++k) {
    if (text[k] == '"') return std::nullopt;  // the string ends here: more than text stands in the hole
    if (text[k] == '\\' && k + 1 < text.size()) ++k;
    out += text[k];
  }
  return out;
}

struct Match {
  std::optional<std::string> system;  ///< What stands in the holes, if there are some.
};

/// Equal, but for holes that hold one text.
std::optional<Match> match(const Statements& statements, const Statements& pattern) {
  if (statements.size() != pattern.size()) return std::nullopt;
  Match out;
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    if (statements[i] == pattern[i] && pattern[i].find(kHole) == std::string::npos) continue;
    auto text = fill_of_hole(statements[i], pattern[i]);
    if (!text || (out.system && *out.system != *text)) return std::nullopt;
    out.system = std::move(text);
  }
  return out;
}

struct Known {
  const ChatForm* form;
  TemplateStatements statements;
};

const std::vector<Known>& known_templates() {
  static const std::vector<Known> known = [] {
    std::vector<Known> out;
    for (const ChatForm& form : chat_forms()) {
      for (const std::string& source : form.sources) out.push_back({&form, template_statements(source).value()});
    }
    return out;
  }();
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

void check_eos(const ChatForm& form, const std::string& eos, const std::string& where) {
  QLORAPP_CHECK_FORMAT(
      !eos.empty() || (form.assistant.end != "{eos}" && form.ending != "{eos}"),
      "[{}] tokenizer_config.json must name eos_token, because the chat template writes it; it does not. Add it there.", where);
}

struct FolderTokens {
  TokenizerConfig config;
  std::string bos, eos;
};

FolderTokens tokens_in(const std::string& folder) {
  FolderTokens out{read_tokenizer_config(folder), {}, {}};
  out.bos = token_in(out.config.values, "bos_token");
  out.eos = token_in(out.config.values, "eos_token");
  return out;
}

}  // namespace

ChatTemplate::ChatTemplate(const ChatForm& form, std::string bos_token, std::string eos_token)
    : form_(&form), bos_token_(std::move(bos_token)), eos_token_(std::move(eos_token)) {
  if (form.default_system) default_system_ = std::string(*form.default_system);
}

std::optional<ChatTemplate> ChatTemplate::from_folder(const std::string& folder) {
  const FolderTokens tokens = tokens_in(folder);
  const std::string jinja_path = files::path_in(folder, "chat_template.jinja");
  if (files::has_entry(folder, "chat_template.jinja"))
    return from_source(read_file_inside(jinja_path, kLargestTemplateFile), tokens.bos, tokens.eos, jinja_path);
  const auto jinja = template_in(tokens.config.values, tokens.config.path);
  if (!jinja) return std::nullopt;
  return from_source(*jinja, tokens.bos, tokens.eos, tokens.config.path);
}

namespace {

bool is_file(const std::string& name_or_file) {
  return name_or_file.ends_with(".jinja") || name_or_file.find('/') != std::string::npos;
}

const ChatForm& form_of(std::string_view name) {
  for (const ChatForm& form : chat_forms()) {
    if (form.name == name) return form;
  }
  throw ValueError(message("[chat_template] must be one of {}, or the path of a .jinja file; got '{}'.{}",
                           joined(ChatTemplate::names()), name, did_you_mean(name, ChatTemplate::names())));
}

}  // namespace

std::string ChatTemplate::source(const std::string& name_or_file) {
  if (is_file(name_or_file)) return read_file(name_or_file, kLargestSource);
  const ChatForm& form = form_of(name_or_file);
  std::string jinja = form.sources.front();
  for (size_t at = jinja.find(kHole); at != std::string::npos; at = jinja.find(kHole, at))
    jinja.replace(at, kHole.size(), form.default_system.value_or(""));
  return jinja;
}

bool ChatTemplate::is_in(const std::string& folder) {
  if (files::has_entry(folder, "chat_template.jinja")) return true;
  const TokenizerConfig config = read_tokenizer_config(folder);
  return template_in(config.values, config.path).has_value();
}

ChatTemplate ChatTemplate::choose(const std::string& name_or_file, const std::string& folder) {
  const FolderTokens tokens = tokens_in(folder);
  if (is_file(name_or_file))
    return from_source(read_file(name_or_file, kLargestTemplateFile), tokens.bos, tokens.eos, name_or_file);
  ChatTemplate out = named(name_or_file, tokens.bos, tokens.eos);
  check_eos(*out.form_, tokens.eos, tokens.config.path);
  return out;
}

ChatTemplate ChatTemplate::from_source(std::string_view jinja, std::string bos_token, std::string eos_token,
                                       const std::string& where) {
  const auto statements = jinja.size() <= kLargestTemplate ? template_statements(jinja) : std::nullopt;
  for (const bool plain : {false, true}) {
    for (const Known& known : known_templates()) {
      if (!statements) break;
      const auto found = plain ? match(statements->plain, known.statements.plain) : match(statements->all, known.statements.all);
      if (!found) continue;
      ChatTemplate out(*known.form, std::move(bos_token), std::move(eos_token));
      check_eos(*known.form, out.eos_token_, where);
      if (found->system) out.default_system_ = found->system;
      out.knows_tools_ = !plain;
      return out;
    }
  }
  throw UnsupportedError(
      message("[{}] the chat template must be one of {}; got another one. Templates are compared here, never run. Choose one with "
              "--chat_template NAME or FILE, or install transformers (pip install \"qlorapp[hf]\"): the wheel's qlorapp command "
              "then renders any template.",
              where, joined(names())));
}

ChatTemplate ChatTemplate::named(std::string_view name, std::string bos_token, std::string eos_token) {
  return {form_of(name), std::move(bos_token), std::move(eos_token)};
}

std::span<const std::string_view> ChatTemplate::names() { return chat_form_names(); }

bool ChatTemplate::reads_key(std::string_view key) const {
  return names_key(form_->sources.front(), key) || (!form_->opens.empty() && key == "reasoning_content");
}

std::string joined_parts(std::span<const std::string> parts) {
  std::string out;
  for (std::size_t i = 0; i < parts.size(); ++i) out += (i > 0 ? "\n" : "") + parts[i];
  return out;
}

std::string_view ChatTemplate::name() const { return form_->name; }

std::string ChatTemplate::end_of_turn() const {
  return form_->assistant.end == "{eos}" ? eos_token_ : std::string(form_->assistant.end);
}

RenderedChat ChatTemplate::render(std::span<const Message> messages, const ChatOptions& options) const {
  QLORAPP_CHECK_VALUE(!messages.empty(),
                      "[chat_template] a conversation must have a message; got none. Add one, or remove the row.");
  QLORAPP_CHECK_VALUE(knows_tools_ || !uses_tools(messages, options),
                      "[chat_template] this variant of {} supports only conversations without tools; the row has tools. Install "
                      "transformers (pip install \"qlorapp[hf]\") and use the wheel's qlorapp command, or remove the row.",
                      name());
  std::vector<Message> trimmed;
  if (form_->trims_parts && std::any_of(messages.begin(), messages.end(), [](const Message& m) { return !m.parts.empty(); })) {
    trimmed.assign(messages.begin(), messages.end());
    for (Message& message : trimmed) {
      if (message.parts.empty() || message.role == "system") continue;
      message.content.clear();
      for (const std::string& part : message.parts) message.content += unicode::strip(part);
    }
    messages = trimmed;
  }
  return write_chat(*form_, {bos_token_, eos_token_}, default_system_, messages, options);
}

}  // namespace qlorapp
