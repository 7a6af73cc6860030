// SPDX-License-Identifier: Apache-2.0
#include "chat_renderer.hpp"

#include <algorithm>
#include <array>
#include <charconv>

#include "core/check.hpp"
#include "unicode.hpp"

namespace qlorapp {
namespace {

constexpr std::string_view kMark = "\xe2\x90\x9e";                                             // U+241E: what no conversation says
constexpr std::array<const char*, 3> kThoughts{"reasoning_content", "thinking", "reasoning"};  // as transformers names them

std::string_view left_stripped(std::string_view text) {
  const std::string_view inside = unicode::strip(text);
  return inside.empty() ? text.substr(text.size()) : text.substr(static_cast<std::size_t>(inside.data() - text.data()));
}

std::string_view right_stripped(std::string_view text) {
  const std::string_view inside = unicode::strip(text);
  return inside.empty() ? text.substr(0, 0) : text.substr(0, static_cast<std::size_t>(inside.data() - text.data()) + inside.size());
}

std::string_view behind_last(std::string_view text, std::string_view part) {
  const std::size_t at = text.rfind(part);
  return at == std::string_view::npos ? text : text.substr(at + part.size());
}

/// The message as the template gets it: thoughts under each of their names, as transformers gives them.
Row row_of(const Message& message) {
  Row out{{"role", message.role}, {"content", message.content}};
  if (!message.parts.empty()) out["content"] = Row::array();
  for (const std::string& part : message.parts) out["content"].push_back({{"type", "text"}, {"text", part}});
  if (!message.rest.empty()) out.update(Row::parse(message.rest));
  const auto* const name =
      std::find_if(kThoughts.begin(), kThoughts.end(), [&](const char* key) { return out.contains(key) && !out[key].is_null(); });
  if (name == kThoughts.end()) return out;
  const Row thoughts = out[*name];
  Row named;
  named["thinking"] = thoughts;
  named.update(out);
  named["reasoning_content"] = thoughts;
  return named;
}

std::vector<std::string> texts_of(const Row& message) {
  std::vector<std::string> out;
  const Row& content = message.at("content");
  if (content.is_string()) out.push_back(content.get<std::string>());
  if (content.is_array()) {
    for (const Row& part : content) out.push_back(part.at("text").get<std::string>());
  }
  return out;
}

std::string thoughts_of(const Row& message) {
  for (const char* const key : kThoughts) {
    if (!message.contains(key) || !message[key].is_string()) continue;
    std::string_view text = message[key].get_ref<const std::string&>();
    while (text.starts_with('\n')) text.remove_prefix(1);
    while (text.ends_with('\n')) text.remove_suffix(1);
    return std::string(text);
  }
  return {};
}

bool has_calls(const Row& message) { return message.contains("tool_calls") && !message["tool_calls"].empty(); }

/// <think>, <any:think> or [THINK] at the end of a header, and where it begins.
std::optional<std::pair<std::size_t, std::string>> opening_of(std::string_view head) {
  const std::string_view text = right_stripped(head);
  const std::size_t begin = text.ends_with(']') ? text.rfind('[') : text.rfind('<');
  if (begin == std::string_view::npos) return std::nullopt;
  const std::string_view tag = text.substr(begin);
  const bool thinks =
      tag == "[THINK]" || tag == "<think>" || (tag.ends_with(":think>") && tag.find_first_of(" /\n") == std::string_view::npos);
  return thinks ? std::optional(std::pair(begin, std::string(tag))) : std::nullopt;
}

/// The day of ChatOptions::date_string in the format that strftime_now() is asked for. Templates ask for the day of the call; the same rows
/// would give other tokens tomorrow.
std::string day_as(const std::string& format, const std::string& date) {
  constexpr std::array<std::string_view, 12> kMonths{"January", "February", "March",     "April",   "May",      "June",
                                                     "July",    "August",   "September", "October", "November", "December"};
  constexpr std::array<std::string_view, 7> kDays{"Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"};
  int day = 0, year = 0;
  std::size_t month = 0;
  const std::size_t first = date.find(' '), last = date.rfind(' ');
  if (first != std::string::npos && last > first) {
    std::from_chars(date.data(), date.data() + first, day);
    std::from_chars(date.data() + last + 1, date.data() + date.size(), year);
    const std::string_view name = std::string_view(date).substr(first + 1, last - first - 1);
    while (month < 12 && !(name.size() >= 3 && kMonths[month].starts_with(name))) ++month;
  } else {
    month = 12;
  }
  if (month == 12 || day < 1 || day > 31 || year < 1) return date;
  const int moved = static_cast<int>(month) < 2 ? year - 1 : year;  // Sakamoto's day of the week
  constexpr std::array<int, 12> kShift{0, 3, 2, 5, 0, 3, 5, 1, 4, 6, 2, 4};
  const auto weekday = static_cast<std::size_t>((moved + moved / 4 - moved / 100 + moved / 400 + kShift[month] + day) % 7);
  std::string out;
  for (std::size_t i = 0; i < format.size(); ++i) {
    if (format[i] != '%' || i + 1 >= format.size()) {
      out += format[i];
      continue;
    }
    bool padded = true;
    if (format[i + 1] == '-' && i + 2 < format.size()) {
      padded = false;
      ++i;
    }
    const auto number = [&](int value) { return padded ? message("{:02}", value) : message("{}", value); };
    switch (format[++i]) {
      case 'd':
        out += number(day);
        break;
      case 'm':
        out += number(static_cast<int>(month) + 1);
        break;
      case 'y':
        out += number(year % 100);
        break;
      case 'Y':
        out += message("{:04}", year);
        break;
      case 'b':
        out += kMonths[month].substr(0, 3);
        break;
      case 'B':
        out += kMonths[month];
        break;
      case 'a':
        out += kDays[weekday].substr(0, 3);
        break;
      case 'A':
        out += kDays[weekday];
        break;
      case 'H':
      case 'M':
      case 'S':
        out += number(0);
        break;
      case '%':
        out += '%';
        break;
      default:
        throw jinja::Failure(message("strftime_now() is computed for %d %m %y %Y %b %B %a %A %H %M %S, not for %{}", format[i]));
    }
  }
  return out;
}

/// The longest special token that the text begins with; "" if there is none.
std::string special_at(const ChatTemplate::Parts& parts, std::string_view text) {
  std::string_view found;
  for (const std::string& token : parts.specials) {
    if (token.size() > found.size() && text.starts_with(token)) found = token;
  }
  return std::string(found);
}

/// The same, and where there is none what looks like one: a base model may not have the token that ends a turn.
std::string end_at(const ChatTemplate::Parts& parts, std::string_view text) {
  std::string special = special_at(parts, text);
  if (!special.empty() || !(text.starts_with('<') || text.starts_with('['))) return special;
  const std::size_t close = text.find(text[0] == '<' ? '>' : ']');
  return close == std::string_view::npos ? std::string() : std::string(text.substr(0, close + 1));
}

/// How many bytes at the ends of two texts are equal.
std::size_t common_end(std::string_view a, std::string_view b) {
  std::size_t out = 0;
  while (out < a.size() && out < b.size() && a[a.size() - 1 - out] == b[b.size() - 1 - out]) ++out;
  return out;
}

}  // namespace

ChatRenderer::ChatRenderer(const ChatTemplate::Parts& parts, std::span<const Message> messages, const ChatOptions& options)
    : parts_(parts), options_(options) {
  for (const Message& message : messages) messages_.push_back(row_of(message));
}

jinja::Template::Rendered ChatRenderer::run(std::span<const Row> messages, bool prompt) const {
  const std::string date = options_.today.value_or(options_.date_string.value_or(std::string(kDefaultDate)));
  jinja::List list;
  for (const Row& message : messages) list.push_back(jinja::Value::of(message));
  jinja::Dict variables = parts_.tokens;
  const auto add = [&](const char* name, jinja::Value value) { variables.set(name, std::move(value)); };
  add("messages", std::move(list));
  add("tools", options_.tools.empty() ? jinja::Value(jinja::Value::None{}) : jinja::Value::of(Row::parse(options_.tools)));
  add("documents", jinja::Value::None{});
  add("add_generation_prompt", prompt);
  if (options_.date_string) add("date_string", *options_.date_string);
  add("strftime_now", jinja::Function([date](const jinja::Arguments& arguments) {
        return jinja::Value(day_as(arguments.values.empty() ? std::string() : arguments.values[0].str(), date));
      }));
  if (!options_.variables.empty()) {
    const jinja::Value more = jinja::Value::of(Row::parse(options_.variables));
    for (const auto& [key, value] : more.dict()->entries) variables.set(*key.text(), value);
  }
  return parts_.jinja.render(variables);
}

std::string ChatRenderer::head_of_answer() const {
  return messages_.size() > 1 ? run(std::span(messages_).first(messages_.size() - 1), true).text : std::string();
}

bool ChatRenderer::writes_lists() const {
  std::string text;
  try {
    text = run(messages_, false).text;
  } catch (const jinja::Failure&) { return false; }  // it accepts strings only
  for (const Row& message : messages_) {
    if (!message.at("content").is_array()) continue;
    for (const std::string& said : texts_of(message)) {
      if (text.find(unicode::strip(said)) == std::string::npos) return false;
    }
  }
  return text.find("'type': 'text'") == std::string::npos && text.find(R"("type": "text")") == std::string::npos;
}

void ChatRenderer::join_lists() {
  for (Row& message : messages_) {
    if (message.at("content").is_array()) message["content"] = joined_parts(texts_of(message));
  }
}

RenderedChat ChatRenderer::render() {
  try {
    const bool lists =
        std::any_of(messages_.begin(), messages_.end(), [](const Row& message) { return message.at("content").is_array(); });
    if (lists && !writes_lists()) join_lists();
    jinja::Template::Rendered rendered = run(messages_, options_.add_generation_prompt);
    RenderedChat out{std::move(rendered.text), {}};
    if (!(options_.turns || options_.served) || messages_.back().at("role") != "assistant") return out;
    std::optional<Answer> answer;
    if (options_.served) answer = answer_behind_opening(out.text);
    if (!answer) {
      answer = answer_in(out.text, rendered.generated);
      if (options_.served && !answer->ended && answer->ranges.back().end == out.text.size()) {
        out.text += next_header();
        answer->ranges.back().end = out.text.size();
      }
    }
    out.turns = std::move(answer->ranges);
    return out;
  } catch (const jinja::Failure& failure) {
    const std::string_view what = failure.what();
    throw ValueError(message(
        "[chat_template] the template refuses the conversation: {}. Change or remove the row, or choose another template with "
        "--chat_template.",
        what.empty() ? "it gives no reason" : what));
  }
}

ChatRenderer::Answer ChatRenderer::answer_in(std::string& text,
                                             const std::vector<std::pair<std::size_t, std::size_t>>& generated) const {
  const Row& message = messages_.back();
  const std::string head = head_of_answer();
  Answer out;
  if (!generated.empty()) {
    const auto begin =
        static_cast<std::size_t>(std::mismatch(head.begin(), head.end(), text.begin(), text.end()).first - head.begin());
    for (const auto& [left, right] : generated) {
      if (right > begin && right > left) out.ranges.push_back({std::max(left, begin), right});
    }
    if (!out.ranges.empty()) return out;
  }
  const auto not_found = [&](bool holds) {
    QLORAPP_CHECK_VALUE(
        holds,
        "[chat_template] the assistant's message {} cannot be located in this chat template's text. Put {{% generation %}} … "
        "{{% endgeneration %}} around the assistant's turn in the template.",
        messages_.size() - 1);
  };
  std::size_t begin = head.size();
  if (head.empty() || !text.starts_with(head)) {
    // What stands in front of it depends on the answer, as Mistral writes the system message only while the user speaks last. Where it is
    // served, the header's end stands in front of it too: there the two are put together.
    const std::vector<std::string> texts = texts_of(message);
    const std::string_view said = texts.empty() ? std::string_view() : unicode::strip(behind_last(texts.front(), "</think>"));
    const std::size_t content = said.empty() ? std::string::npos : text.rfind(said);
    not_found(content != std::string::npos && !has_calls(message));
    begin = content;
    std::size_t most = 0;
    for (std::size_t at = content + 1; at-- > 0 && content - at <= 64;) {
      const std::size_t same = common_end(std::string_view(text).substr(0, at), head);
      if (same > most) {
        most = same;
        begin = at;
      }
    }
    not_found(messages_.size() == 1 || most > 0);
    if (options_.served && !head.empty()) {
      text = head + text.substr(begin);
      begin = head.size();
    }
  }
  if (has_calls(message)) {
    std::optional<Answer> called = answer_with_calls(text, begin);
    not_found(called.has_value());
    return *std::move(called);
  }
  std::size_t end = begin;
  for (const std::string& part : texts_of(message)) {
    const std::string_view said = unicode::strip(behind_last(part, "</think>"));  // a template may write thoughts in another way
    const std::size_t at = text.find(said, end);
    not_found(at != std::string::npos);
    end = at + said.size();
  }
  const std::string_view rest =
      left_stripped(std::string_view(text).substr(end));  // some templates keep white space behind the content
  const std::string special = end_at(parts_, rest);
  out.ended = !special.empty();
  out.ranges.push_back({begin, out.ended ? text.size() - rest.size() + special.size() : end});
  return out;
}

/// Of a message with tool calls: changing the last call changes the text up to the end of the turn only.
std::optional<ChatRenderer::Answer> ChatRenderer::answer_with_calls(const std::string& text, std::size_t begin) const {
  std::vector<Row> other = messages_;
  Row& last = other.back()["tool_calls"].back();
  Row& call = last.contains("function") && last["function"].is_object() ? last["function"] : last;
  const bool is_text = call.contains("arguments") && call["arguments"].is_string();
  call["name"] = kMark;
  call["arguments"] = is_text ? Row(kMark) : Row{{std::string(kMark), kMark}};
  const std::string changed = run(other, options_.add_generation_prompt).text;
  if (changed == text) return std::nullopt;  // the template does not write tool calls
  const std::size_t from = std::max(begin, text.size() - common_end(text, changed));
  std::size_t at = std::string::npos, length = 0;
  for (const std::string& token : parts_.specials) {
    const std::size_t found = token.empty() ? std::string::npos : text.find(token, from);
    if (found == std::string::npos || (at != std::string::npos && (found > at || (found == at && token.size() < length)))) continue;
    at = found;
    length = token.size();
  }
  if (at == std::string::npos) return Answer{{{begin, text.size()}}, false};
  return Answer{{{begin, at + length}}, true};
}

/// For a template whose header of an answer opens a thought: the conversation as it is served.
///
/// DeepSeek's distills are asked behind "<think>", which their template writes in no answer: the answer is its thoughts, the end of them,
/// and what the template writes.
std::optional<ChatRenderer::Answer> ChatRenderer::answer_behind_opening(std::string& text) const {
  const Row& message = messages_.back();
  std::string head = head_of_answer();
  const auto opening = opening_of(head);
  if (!opening || text.starts_with(head) || !text.starts_with(std::string_view(head).substr(0, opening->first)) ||
      has_calls(message))
    return std::nullopt;
  const auto& [place, begin] = *opening;
  std::string end = begin;
  end.insert(1, "/");
  const std::string content = joined_parts(texts_of(message));
  const std::string_view said = behind_last(content, end), trimmed = unicode::strip(said);
  std::string answer, rest;
  if (std::string_view(text).substr(place).starts_with(begin)) {  // it writes thoughts, with other white space
    const std::string_view written = left_stripped(std::string_view(text).substr(place + begin.size()));
    const std::size_t at = written.find(trimmed);
    if (at == std::string_view::npos) return std::nullopt;
    answer = written.substr(0, at + trimmed.size());
    rest = written.substr(at + trimmed.size());
  } else {
    if (content.find(end) != std::string::npos) {
      std::string_view inside = left_stripped(content);
      if (inside.starts_with(begin)) inside.remove_prefix(begin.size());
      while (inside.starts_with('\n')) inside.remove_prefix(1);
      answer = inside;
    } else {
      const std::string thoughts = thoughts_of(message);
      answer = thoughts + (thoughts.empty() ? "" : "\n") + end + "\n\n" + std::string(said);
    }
    const std::size_t at = text.find(trimmed, place);
    if (at == std::string::npos) return std::nullopt;
    rest = text.substr(at + trimmed.size());
    if (!trimmed.empty()) answer = right_stripped(answer);  // the rest begins with what the template keeps
    else rest = left_stripped(std::string(rest));
  }
  const std::string_view behind = left_stripped(rest);
  const std::string special = end_at(parts_, behind);
  const std::size_t first = head.size(),
                    stop = first + answer.size() + (special.empty() ? 0 : rest.size() - behind.size() + special.size());
  text = head + answer + rest;
  return Answer{{{first, stop}}, true};
}

/// The special token that follows the last answer when the conversation goes on, for a template that writes no end of a turn: GLM's models
/// stop by <|user|> or <|observation|>. Empty if there is none.
std::string ChatRenderer::next_header() const {
  std::vector<Row> longer(messages_.begin(), messages_.end() - 1);
  longer.push_back({{"role", "assistant"}, {"content", kMark}});
  longer.push_back({{"role", has_calls(messages_.back()) ? "tool" : "user"}, {"content", ""}});
  try {
    const std::string text = run(longer, false).text;
    return special_at(parts_, behind_last(text, kMark));
  } catch (const jinja::Failure&) { return {}; }  // the template refuses what follows
}

std::optional<std::string> end_of_answer(const ChatTemplate::Parts& parts) {
  const std::array<Message, 2> messages{{{"user", "a"}, {"assistant", std::string(kMark)}}};
  std::string text;
  try {
    text = ChatRenderer(parts, messages, {.turns = false}).render().text;
  } catch (const Error&) { return std::nullopt; }
  const std::size_t at = text.rfind(kMark);
  if (at == std::string::npos) return std::nullopt;
  const std::string found = end_at(parts, left_stripped(std::string_view(text).substr(at + kMark.size())));
  return found.empty() ? std::nullopt : std::optional(found);
}

}  // namespace qlorapp
