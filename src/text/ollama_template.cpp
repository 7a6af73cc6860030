// SPDX-License-Identifier: Apache-2.0
#include "ollama_template.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/check.hpp"

namespace qlorapp {
namespace {

/// Words that no template looks for.
const Message kSystem{"system", "Qsystem"};
Message user(int i) { return {"user", message("Quser{}", i)}; }
Message assistant(int i) { return {"assistant", message("Qanswer{}", i)}; }

/// A question, and `rounds` answers with further questions.
std::vector<Message> conversation(int rounds, bool system) {
  std::vector<Message> messages;
  if (system) messages.push_back(kSystem);
  messages.push_back(user(0));
  for (int i = 1; i <= rounds; ++i) {
    messages.push_back(assistant(i));
    messages.push_back(user(i));
  }
  return messages;
}

std::string text_of(const ChatTemplate& jinja, std::span<const Message> messages) {
  return jinja.render(messages, {.add_generation_prompt = true, .turns = false}).text;
}

[[noreturn]] void refuse(const std::string& reason) {
  throw FormatError(
      message("[export] the chat template cannot be written in Ollama's language: {}. Choose another with "
              "--chat_template, or write a Modelfile of your own around --gguf FILE.",
              reason));
}

/// The text before, between and behind the messages, in their order in the text.
std::vector<std::string> cut(const std::string& text, std::span<const Message> messages) {
  std::vector<std::pair<size_t, size_t>> places;
  for (const Message& message : messages) {
    const size_t at = text.find(message.content);
    if (at == std::string::npos || text.find(message.content, at + 1) != std::string::npos)
      refuse(qlorapp::message("it writes a message of the {} not once", message.role));
    places.emplace_back(at, at + message.content.size());
  }
  std::ranges::sort(places);
  std::vector<std::string> parts;
  size_t begin = 0;
  for (const auto& [from, to] : places) {
    parts.push_back(text.substr(begin, from - begin));
    begin = to;
  }
  parts.push_back(text.substr(begin));
  return parts;
}

/// A literal of Go in an action; nothing for an empty one.
std::string literal(std::string_view text) {
  if (text.empty()) return {};
  std::string out = "{{ \"";
  for (const char c : text) {
    if (c == '\n') out += "\\n";
    else if (c == '\t') out += "\\t";
    else if (c == '\r') out += "\\r";
    else if (c == '"' || c == '\\') (out += '\\') += c;
    else out += c;
  }
  return out + "\" }}";
}

}  // namespace

OllamaTemplate::OllamaTemplate(const ChatTemplate& jinja, const std::string& bos) : bos_(bos) {
  const auto first = conversation(0, false), second = conversation(1, false);
  const std::vector<std::string> parts = cut(text_of(jinja, first), first), more = cut(text_of(jinja, second), second);
  start_ = parts[0];
  generation_ = parts[1];
  asked_ = more[1];
  answered_ = more[2];
  find_system(jinja);
  check(jinja);
  // check() compares whole texts.
  const auto drop_bos = [&](std::string& text) {
    if (!bos_.empty() && text.starts_with(bos_)) text.erase(0, bos_.size());
  };
  drop_bos(start_);
  if (system_ && !system_->last) drop_bos(system_->before);
}

void OllamaTemplate::find_system(const ChatTemplate& jinja) {
  const auto first = conversation(0, true), second = conversation(1, true);
  std::string one, two;
  try {
    one = text_of(jinja, first);
    two = text_of(jinja, second);
  } catch (const ValueError&) { return; }                      // it raises for a system message
  if (one.find(kSystem.content) == std::string::npos) return;  // or leaves it out
  const std::vector<std::string> parts = cut(one, first);
  system_ = {parts[0], parts[1], two.find(kSystem.content) > two.find(user(0).content)};
  if (!system_->last) return;
  if (!parts[0].starts_with(start_)) refuse("it writes the system message in two ways");
  system_->before = parts[0].substr(start_.size());
}

std::string OllamaTemplate::render(std::span<const Message> messages) const {
  std::string system, text;
  for (const Message& message : messages) {
    if (message.role == "system") system = message.content;
  }
  const bool writes_system = !system.empty() && system_;
  text = writes_system && !system_->last ? system_->before + system + system_->behind : start_;
  bool answered = false;
  for (size_t i = 0; i < messages.size(); ++i) {
    const bool last = i + 1 == messages.size();
    if (messages[i].role == "user") {
      if (answered) text += answered_;
      if (writes_system && system_->last && last) text += system_->before + system + system_->behind;
      text += messages[i].content + (last ? generation_ : asked_);
    } else if (messages[i].role == "assistant") {
      text += messages[i].content;
      answered = true;
    }
  }
  return text;
}

void OllamaTemplate::check(const ChatTemplate& jinja) const {
  for (const bool system : {false, true}) {
    if (system && !system_) continue;
    for (const int rounds : {0, 1, 2, 3}) {
      const auto messages = conversation(rounds, system);
      if (render(messages) == text_of(jinja, messages)) continue;
      refuse(message("what it writes around {} message(s) of a conversation{} is not the same for each of them", 2 * rounds + 1,
                     system ? " with a system message" : ""));
    }
  }
}

std::string OllamaTemplate::go() const {
  std::string out = literal(start_);
  if (system_ && !system_->last) {
    out = message("{{{{- if .System }}}}{}{{{{ .System }}}}{}{{{{ else }}}}{}{{{{ end }}}}", literal(system_->before),
                  literal(system_->behind), out);
  }
  out += "\n{{- $answered := false }}\n{{- range $i, $_ := .Messages }}\n{{- $last := eq (len (slice $.Messages $i)) 1 }}\n";
  out += "{{- if eq .Role \"user\" }}";
  if (!answered_.empty()) out += "{{ if $answered }}" + literal(answered_) + "{{ end }}";
  if (system_ && system_->last) {
    out += message("{{{{ if and $last $.System }}}}{}{{{{ $.System }}}}{}{{{{ end }}}}", literal(system_->before),
                   literal(system_->behind));
  }
  out += "{{ .Content }}";
  if (generation_ == asked_) out += literal(asked_);
  else out += message("{{{{ if $last }}}}{}{{{{ else }}}}{}{{{{ end }}}}", literal(generation_), literal(asked_));
  return out + "\n{{- else if eq .Role \"assistant\" }}{{ .Content }}{{ $answered = true }}\n{{- end }}\n{{- end }}";
}

}  // namespace qlorapp
