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

jinja::Value list_of(std::span<const std::string> texts) {
  jinja::List out;
  for (const std::string& text : texts) {
    jinja::Dict part;
    part.set("type", "text");
    part.set("text", text);
    out.emplace_back(std::move(part));
  }
  return out;
}

/// The message as the template gets it: thoughts under each of their names, as transformers gives them. It must outlive the value.
jinja::Value value_of(const Message& message) {
  jinja::Dict out;
  const jinja::Value rest = message.rest.empty() ? jinja::Value(jinja::Dict()) : jinja::Value::of(Row::parse(message.rest));
  const auto given = [&](const char* key) {
    const jinja::Value* const value = rest.dict()->find(key);
    return value != nullptr && !value->is_none();
  };
  const auto* const name = std::find_if(kThoughts.begin(), kThoughts.end(), given);
  if (name != kThoughts.end()) out.set("thinking", *rest.dict()->find(*name));
  out.set("role", message.role);
  out.set("content", message.parts.empty() ? jinja::Value::borrowed(message.content) : list_of(message.parts));
  for (const auto& [key, value] : rest.dict()->entries) out.set(*key.text(), value);
  if (name != kThoughts.end()) out.set("reasoning_content", *rest.dict()->find(*name));
  return out;
}

/// message[key]; undefined if it has none.
jinja::Value part_of(const jinja::Value& message, std::string_view key) {
  const jinja::Value* const found = message.dict() != nullptr ? message.dict()->find(key) : nullptr;
  return found != nullptr ? *found : jinja::Value();
}

/// The same with another value under a key.
jinja::Value with(const jinja::Value& object, std::string_view key, jinja::Value value) {
  jinja::Dict out = object.dict() != nullptr ? *object.dict() : jinja::Dict();
  out.set(key, std::move(value));
  return out;
}

jinja::Value message_of(const char* role, std::string_view content) {
  jinja::Dict out;
  out.set("role", role);
  out.set("content", content);
  return out;
}

bool is_list(const jinja::Value& message) { return part_of(message, "content").sequence() != nullptr; }

/// The texts of a content: views of the message's.
std::vector<std::string_view> texts_of(const jinja::Value& message) {
  std::vector<std::string_view> out;
  const jinja::Value* const content = message.dict()->find("content");
  if (content == nullptr) return out;
  if (content->text() != nullptr) out.emplace_back(*content->text());
  if (content->sequence() != nullptr) {
    for (const jinja::Value& part : content->sequence()->items) out.emplace_back(*part.dict()->find("text")->text());
  }
  return out;
}

std::string joined_texts_of(const jinja::Value& message) {
  std::string out;
  bool first = true;
  for (const std::string_view text : texts_of(message)) {
    if (!first) out += '\n';
    first = false;
    out += text;
  }
  return out;
}

std::string thoughts_of(const jinja::Value& message) {
  for (const char* const key : kThoughts) {
    const jinja::Value given = part_of(message, key);
    if (given.text() == nullptr) continue;
    std::string_view text = *given.text();
    while (text.starts_with('\n')) text.remove_prefix(1);
    while (text.ends_with('\n')) text.remove_suffix(1);
    return std::string(text);
  }
  return {};
}

bool has_calls(const jinja::Value& message) { return part_of(message, "tool_calls").truth(); }

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
  if (month == 12 || day < 1 || day > 31 || year < 1)
    throw jinja::Failure(message("a day must be written as 26 Jul 2024 for strftime_now(); got '{}'", date));
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

/// How many bytes of what stands behind an answer end it: through the special tokens at its beginning, or what looks like one there, as a base
/// model may not have the token that ends a turn, or the first special tokens behind other text. 0 if there is none of them.
std::size_t end_in(const ChatTemplate::Parts& parts, std::string_view tail) {
  const auto specials_at = [&](std::size_t at) {
    std::size_t end = at;
    for (std::string token = special_at(parts, tail.substr(at)); !token.empty(); token = special_at(parts, tail.substr(end)))
      end += token.size();
    return end > at ? end : 0;
  };
  const std::string_view text = left_stripped(tail);
  const std::size_t begin = tail.size() - text.size();
  if (const std::size_t end = specials_at(begin)) return end;
  if (text.starts_with('<') || text.starts_with('[')) {
    const std::size_t close = text.find(text[0] == '<' ? '>' : ']');
    if (close != std::string_view::npos) return begin + close + 1;
  }
  for (std::size_t at = begin; at < tail.size(); ++at) {
    if (const std::size_t end = specials_at(at)) return end;
  }
  return 0;
}

std::string format_of(const jinja::Arguments& arguments) {
  const jinja::Value* const format = arguments.find(0, "format");
  if (format == nullptr || format->text() == nullptr) throw jinja::Failure("strftime_now() needs a format");
  return *format->text();
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
  for (const Message& message : messages) messages_.push_back(value_of(message));
}

jinja::Template::Rendered ChatRenderer::run(std::span<const jinja::Value> messages, bool prompt) const {
  const std::string date = options_.today.value_or(options_.date_string.value_or(std::string(kDefaultDate)));
  jinja::Dict variables = parts_.tokens;
  const auto add = [&](const char* name, jinja::Value value) { variables.set(name, std::move(value)); };
  add("messages", jinja::List(messages.begin(), messages.end()));
  add("tools", options_.tools.empty() ? jinja::Value(jinja::Value::None{}) : jinja::Value::of(Row::parse(options_.tools)));
  add("documents", jinja::Value::None{});
  add("add_generation_prompt", prompt);
  if (options_.date_string) add("date_string", *options_.date_string);
  add("strftime_now",
      jinja::Function([date](const jinja::Arguments& arguments) { return jinja::Value(day_as(format_of(arguments), date)); }));
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
  for (const jinja::Value& message : messages_) {
    if (!is_list(message)) continue;
    for (const std::string_view said : texts_of(message)) {
      if (text.find(unicode::strip(said)) == std::string::npos) return false;
    }
  }
  return text.find("'type': 'text'") == std::string::npos && text.find(R"("type": "text")") == std::string::npos;
}

void ChatRenderer::join_lists() {
  for (jinja::Value& message : messages_) {
    if (is_list(message)) message = with(message, "content", joined_texts_of(message));
  }
}

RenderedChat ChatRenderer::render() {
  try {
    const bool lists = std::any_of(messages_.begin(), messages_.end(), is_list);
    if (lists && !writes_lists()) join_lists();
    jinja::Template::Rendered rendered = run(messages_, options_.add_generation_prompt);
    RenderedChat out{std::move(rendered.text), {}};
    if (!(options_.turns || options_.served) || !(part_of(messages_.back(), "role") == jinja::Value("assistant"))) return out;
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
  const jinja::Value& message = messages_.back();
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
  const std::optional<std::string> tail = has_calls(message) ? std::nullopt : tail_of_answer();
  std::size_t begin = head.size();
  if (head.empty() || !text.starts_with(head)) {
    // What stands in front of it depends on the answer, as Mistral writes the system message only while the user speaks last. Where it is
    // served, the header's end stands in front of it too: there the two are put together.
    not_found(tail && text.ends_with(*tail));
    const std::vector<std::string_view> texts = texts_of(message);
    const std::string_view said = texts.empty() ? std::string_view() : unicode::strip(behind_last(texts.back(), "</think>"));
    const std::size_t content = std::string_view(text).substr(0, text.size() - tail->size()).rfind(said);
    not_found(content != std::string::npos);
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
  not_found(tail && text.ends_with(*tail) && text.size() - tail->size() >= begin);
  const std::size_t ended = end_in(parts_, *tail);
  out.ended = ended > 0;
  out.ranges.push_back({begin, text.size() - tail->size() + ended});
  return out;
}

/// The text behind the last message. The message is rendered with a mark in place of its text (thoughts are kept), and the mark is found.
std::optional<std::string> ChatRenderer::tail_of_answer() const {
  const jinja::Value& message = messages_.back();
  const std::vector<std::string_view> texts = texts_of(message);
  const std::string_view last = texts.empty() ? std::string_view() : texts.back();
  const std::string_view said = left_stripped(behind_last(last, "</think>"));
  const std::string marked = std::string(last.substr(0, last.size() - said.size())) + std::string(kMark);
  std::vector<jinja::Value> other = messages_;
  if (is_list(message) && !texts.empty()) {
    jinja::List parts = part_of(message, "content").sequence()->items;
    parts.back() = with(parts.back(), "text", marked);
    other.back() = with(message, "content", std::move(parts));
  } else {
    other.back() = with(message, "content", marked);
  }
  const std::string text = run(other, options_.add_generation_prompt).text;
  const std::size_t at = text.rfind(kMark);
  return at == std::string::npos ? std::nullopt : std::optional(text.substr(at + kMark.size()));
}

/// Of a message with tool calls: changing the last call changes the text up to the end of the turn only.
std::optional<ChatRenderer::Answer> ChatRenderer::answer_with_calls(const std::string& text, std::size_t begin) const {
  const jinja::Value& message = messages_.back();
  jinja::List calls = part_of(message, "tool_calls").iterated()->items;
  if (calls.empty() || calls.back().dict() == nullptr) return std::nullopt;
  const jinja::Value inner = part_of(calls.back(), "function");
  jinja::Value call = inner.dict() != nullptr ? inner : calls.back();
  jinja::Dict mark;
  mark.set(kMark, kMark);
  const bool is_text = part_of(call, "arguments").text() != nullptr;
  call = with(with(call, "name", kMark), "arguments", is_text ? jinja::Value(kMark) : jinja::Value(std::move(mark)));
  calls.back() = inner.dict() != nullptr ? with(calls.back(), "function", call) : call;
  std::vector<jinja::Value> other = messages_;
  other.back() = with(message, "tool_calls", std::move(calls));
  const std::string changed = run(other, options_.add_generation_prompt).text;
  if (changed == text) return std::nullopt;  // the template does not write tool calls
  // Behind it stand the ends of the call, of all calls, and of the turn: through the last special token.
  const std::size_t from = std::max(begin, text.size() - common_end(text, changed));
  std::size_t end = 0;
  for (const std::string& token : parts_.specials) {
    const std::size_t at = token.empty() ? std::string::npos : text.rfind(token);
    if (at != std::string::npos && at >= from) end = std::max(end, at + token.size());
  }
  if (end > 0) return Answer{{{begin, end}}, true};
  return Answer{{{begin, std::max(begin, right_stripped(text).size())}}, false};
}

/// For a template whose header of an answer opens a thought: the conversation as it is served.
///
/// DeepSeek's distills are asked behind "<think>", which their template writes in no answer: the answer is its thoughts, the end of them,
/// and what the template writes.
std::optional<ChatRenderer::Answer> ChatRenderer::answer_behind_opening(std::string& text) const {
  const jinja::Value& message = messages_.back();
  std::string head = head_of_answer();
  const auto opening = opening_of(head);
  if (!opening || text.starts_with(head) || !text.starts_with(std::string_view(head).substr(0, opening->first)) ||
      has_calls(message))
    return std::nullopt;
  const auto& [place, begin] = *opening;
  std::string end = begin;
  end.insert(1, "/");
  const std::optional<std::string> tail = tail_of_answer();
  if (!tail || !text.ends_with(*tail)) return std::nullopt;
  const std::string content = joined_texts_of(message);
  const std::string_view said = behind_last(content, end);
  std::string answer;
  if (std::string_view(text).substr(place).starts_with(begin)) {  // it writes thoughts, with other white space
    answer = left_stripped(std::string_view(text).substr(0, text.size() - tail->size()).substr(place + begin.size()));
  } else if (content.find(end) != std::string::npos) {
    std::string_view inside = left_stripped(content);
    if (inside.starts_with(begin)) inside.remove_prefix(begin.size());
    while (inside.starts_with('\n')) inside.remove_prefix(1);
    answer = inside;
  } else {
    const std::string thoughts = thoughts_of(message);
    answer = thoughts + (thoughts.empty() ? "" : "\n") + end + "\n\n" + std::string(said);
  }
  // The template strips the end of the text, so the answer is stripped too.
  if (!std::string_view(text).substr(0, text.size() - tail->size()).ends_with(said)) answer = right_stripped(answer);
  const std::size_t first = head.size(), stop = first + answer.size() + end_in(parts_, *tail);
  text = head + answer + *tail;
  return Answer{{{first, stop}}, true};
}

/// The special token that follows the last answer when the conversation goes on, for a template that writes no end of a turn: GLM's models
/// stop by <|user|> or <|observation|>. Empty if there is none.
std::string ChatRenderer::next_header() const {
  std::vector<jinja::Value> longer(messages_.begin(), messages_.end() - 1);
  longer.push_back(message_of("assistant", kMark));
  longer.push_back(message_of(has_calls(messages_.back()) ? "tool" : "user", ""));
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
  const std::string_view tail = left_stripped(std::string_view(text).substr(at + kMark.size()));
  std::string special = special_at(parts, tail);
  if (special.empty()) special = tail.substr(0, end_in(parts, tail));
  return special.empty() ? std::nullopt : std::optional(special);
}

}  // namespace qlorapp
