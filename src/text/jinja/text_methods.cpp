// SPDX-License-Identifier: Apache-2.0
#include "text_methods.hpp"

#include <algorithm>
#include <array>

#include "builtins.hpp"
#include "core/check.hpp"
#include "text/unicode.hpp"

namespace qlorapp::jinja {
namespace {

bool is_upper(char c) { return c >= 'A' && c <= 'Z'; }
bool is_lower(char c) { return c >= 'a' && c <= 'z'; }
char up(char c) { return is_lower(c) ? static_cast<char>(c - 'a' + 'A') : c; }
char down(char c) { return is_upper(c) ? static_cast<char>(c - 'A' + 'a') : c; }

void refuse_other_letters(std::string_view text) {
  for (const unicode::CodePoint& point : unicode::decode(text)) {
    if (point.value < 0x80) continue;
    const std::string_view category = unicode::kCategories[unicode::category_of(point.value)];
    if (category == "Lu" || category == "Ll" || category == "Lt")
      throw Failure(message("upper and lower case of '{}' are not known here; of ASCII they are", text.substr(point.offset, 4)));
  }
}

const std::string& text_at(const Arguments& arguments, std::size_t position, std::string_view name, std::string_view method) {
  const Value* const given = arguments.find(position, name);
  if (given == nullptr || given->text() == nullptr)
    throw Failure(message("{}() needs a str, not {}", method, given == nullptr ? "nothing" : given->type_name()));
  return *given->text();
}

int64_t count_at(const Arguments& arguments, std::size_t position, std::string_view name) {
  const Value* const given = arguments.find(position, name);
  return given != nullptr && !given->is_none() ? given->whole() : -1;
}

bool is_given(const Arguments& arguments, std::size_t position, std::string_view name) {
  const Value* const given = arguments.find(position, name);
  return given != nullptr && !given->is_none();
}

Value stripped(const std::string& text, const Arguments& arguments, bool left, bool right) {
  std::string_view rest = text;
  if (!is_given(arguments, 0, "chars")) {
    const std::string_view inside = unicode::strip(rest);
    const auto begin = inside.empty() ? text.size() : static_cast<std::size_t>(inside.data() - text.data());
    if (inside.empty()) return left || right ? Value("") : Value(text);
    if (right) rest = rest.substr(0, begin + inside.size());
    if (left) rest.remove_prefix(begin);
    return rest;
  }
  const std::vector<std::string_view> letters = characters(text_at(arguments, 0, "chars", "strip"));
  const auto is_one = [&](std::string_view letter) { return std::find(letters.begin(), letters.end(), letter) != letters.end(); };
  while (left && !rest.empty() && is_one(rest.substr(0, unicode::length_at(rest)))) rest.remove_prefix(unicode::length_at(rest));
  while (right && !rest.empty() && is_one(rest.substr(unicode::last_code_point(rest))))
    rest = rest.substr(0, unicode::last_code_point(rest));
  return rest;
}

/// At white space, as split() without a separator.
List words_of(std::string_view text, int64_t most, bool from_right) {
  List out;
  const auto is_space = [](std::string_view letter) { return unicode::strip(letter).empty(); };
  std::vector<std::string_view> letters = characters(text);
  if (from_right) std::reverse(letters.begin(), letters.end());
  for (std::size_t i = 0;;) {
    while (i < letters.size() && is_space(letters[i])) ++i;
    if (i >= letters.size()) break;
    const bool last = most >= 0 && static_cast<int64_t>(out.size()) >= most;
    std::size_t end = i;
    while (end < letters.size() && (last || !is_space(letters[end]))) ++end;
    std::string word;
    for (std::size_t k = i; k < end; ++k) word += letters[from_right ? end - 1 - (k - i) : k];
    out.emplace_back(std::move(word));
    if (last) break;
    i = end;
  }
  if (from_right) std::reverse(out.begin(), out.end());
  return out;
}

Value split(const std::string& text, const Arguments& arguments, bool from_right) {
  const int64_t most = count_at(arguments, 1, "maxsplit");
  if (!is_given(arguments, 0, "sep")) return words_of(text, most, from_right);
  const std::string& separator = text_at(arguments, 0, "sep", "split");
  if (separator.empty()) throw Failure("empty separator");
  List out;
  std::string_view rest = text;
  while (most < 0 || static_cast<int64_t>(out.size()) < most) {
    const std::size_t at = from_right ? rest.rfind(separator) : rest.find(separator);
    if (at == std::string_view::npos) break;
    out.emplace_back(from_right ? rest.substr(at + separator.size()) : rest.substr(0, at));
    rest = from_right ? rest.substr(0, at) : rest.substr(at + separator.size());
  }
  out.emplace_back(rest);
  if (from_right) std::reverse(out.begin(), out.end());
  return out;
}

Value lines_of(const std::string& text, const Arguments& arguments) {
  const Value* const keeps = arguments.find(0, "keepends");
  List out;
  std::string line;
  const std::vector<std::string_view> letters = characters(text);
  constexpr std::array<std::string_view, 10> kEnds{"\n",   "\r",   "\v",       "\f",           "\x1c",
                                                   "\x1d", "\x1e", "\xc2\x85", "\xe2\x80\xa8", "\xe2\x80\xa9"};
  for (std::size_t i = 0; i < letters.size(); ++i) {
    if (std::find(kEnds.begin(), kEnds.end(), letters[i]) == kEnds.end()) {
      line += letters[i];
      continue;
    }
    const bool both = letters[i] == "\r" && i + 1 < letters.size() && letters[i + 1] == "\n";
    if (keeps != nullptr && keeps->truth()) line += both ? "\r\n" : letters[i];
    if (both) ++i;
    out.emplace_back(std::exchange(line, {}));
  }
  if (!line.empty()) out.emplace_back(line);
  return out;
}

Value replaced(const std::string& text, const Arguments& arguments) {
  const std::string &from = text_at(arguments, 0, "old", "replace"), &to = text_at(arguments, 1, "new", "replace");
  int64_t left = count_at(arguments, 2, "count");
  std::string out;
  std::string_view rest = text;
  if (from.empty()) {  // in front of every character, and at the end
    for (const std::string_view letter : characters(text)) {
      if (left != 0) out += to;
      left -= left > 0 ? 1 : 0;
      out += letter;
      if (out.size() > kLongestText) throw Failure("the text is too long");
    }
    return left != 0 ? out + to : out;
  }
  for (; left != 0; left -= left > 0 ? 1 : 0) {
    const std::size_t at = rest.find(from);
    if (at == std::string_view::npos) break;
    out += rest.substr(0, at);
    out += to;
    if (out.size() > kLongestText) throw Failure("the text is too long");
    rest.remove_prefix(at + from.size());
  }
  return out.append(rest);
}

bool begins_or_ends(const std::string& text, const Arguments& arguments, bool begins) {
  const auto holds = [&](const Value& part) {
    if (part.text() == nullptr)
      throw Failure(
          message("{} first arg must be str or a tuple of str, not {}", begins ? "startswith" : "endswith", part.type_name()));
    return begins ? text.starts_with(*part.text()) : text.ends_with(*part.text());
  };
  const Value* const part = arguments.find(0, "prefix");
  if (arguments.values.size() > 1) throw Failure("startswith() and endswith() with places are not computed here");
  if (part == nullptr) throw Failure("startswith() takes at least 1 argument (0 given)");
  if (part->sequence() == nullptr || !part->sequence()->is_tuple) return holds(*part);
  return std::any_of(part->sequence()->items.begin(), part->sequence()->items.end(), holds);
}

Value place_of(const std::string& text, const Arguments& arguments, bool last, bool must_be) {
  const std::string& part = text_at(arguments, 0, "sub", "find");
  if (arguments.values.size() > 1) throw Failure("find() with a place to begin is not computed here");
  const std::size_t at = last ? text.rfind(part) : text.find(part);
  if (at == std::string::npos && must_be) throw Failure("substring not found");
  return at == std::string::npos ? Value(-1) : Value(character_count(std::string_view(text).substr(0, at)));
}

Value parted(const std::string& text, const Arguments& arguments, bool last) {
  const std::string& separator = text_at(arguments, 0, "sep", "partition");
  if (separator.empty()) throw Failure("empty separator");
  const std::size_t at = last ? text.rfind(separator) : text.find(separator);
  if (at == std::string::npos) return Value(last ? List{"", "", text} : List{text, "", ""}, true);
  return Value(List{text.substr(0, at), separator, text.substr(at + separator.size())}, true);
}

Value counted(const std::string& text, const Arguments& arguments) {
  const std::string& part = text_at(arguments, 0, "sub", "count");
  if (arguments.values.size() > 1) throw Failure("count() with places is not computed here");
  if (part.empty()) return character_count(text) + 1;
  int64_t out = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size())) ++out;
  return out;
}

Value formatted(const std::string& text, const Arguments& arguments) {
  std::string out;
  std::size_t next = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool doubled = i + 1 < text.size() && text[i + 1] == text[i];
    if (text[i] == '{' && !doubled) {
      const std::size_t end = text.find('}', i);
      if (end == std::string::npos) throw Failure("expected '}' before end of string");
      const std::string field = text.substr(i + 1, end - i - 1);
      const bool number = !field.empty() && std::all_of(field.begin(), field.end(), [](char c) { return c >= '0' && c <= '9'; });
      if (field.find_first_of(":!.[{") != std::string::npos || field.size() > 6)
        throw Failure("of format() only {}, {0} and {name} are computed here");
      const Value* const value = field.empty() ? arguments.find(next++, "")
                                 : number      ? arguments.find(std::stoul(field), "")
                                               : arguments.find(arguments.values.size(), field);
      if (value == nullptr) throw Failure(message("format() has no argument for '{{{}}}'", field));
      out += value->str();
      if (out.size() > kLongestText) throw Failure("the text is too long");
      i = end;
      continue;
    }
    if ((text[i] == '{' || text[i] == '}') && doubled) ++i;
    out += text[i];
  }
  return out;
}

Value titled_by_python(const std::string& text, const Arguments&) {
  refuse_other_letters(text);
  std::string out;
  bool inside = false;
  for (const char c : text) {
    out += inside ? down(c) : up(c);
    inside = is_upper(c) || is_lower(c);
  }
  return out;
}

Value capitalized(const std::string& text, const Arguments&) {
  std::string out = lowered(text);
  if (!out.empty()) out[0] = up(out[0]);
  return out;
}

Value joined_by(const std::string& text, const Arguments& arguments) {
  if (arguments.values.size() != 1) throw Failure("join() takes exactly one argument");
  std::string out;
  bool first = true;
  const auto all = arguments.values[0].iterated();
  for (const Value& item : all->items) {
    if (item.text() == nullptr) throw Failure(message("sequence item: expected str instance, {} found", item.type_name()));
    if (!first) out += text;
    first = false;
    out += *item.text();
    if (out.size() > kLongestText) throw Failure("the text is too long");
  }
  return out;
}

template <class Holds>
Value all_are(const std::string& text, const Holds& holds) {
  const std::vector<unicode::CodePoint> points = unicode::decode(text);
  return !points.empty() && std::all_of(points.begin(), points.end(), holds);
}

using Method = Value (*)(const std::string&, const Arguments&);
constexpr std::pair<std::string_view, Method> kMethods[] = {
    {"capitalize", capitalized},
    {"count", counted},
    {"endswith", [](const std::string& text, const Arguments& arguments) { return Value(begins_or_ends(text, arguments, false)); }},
    {"find", [](const std::string& text, const Arguments& arguments) { return place_of(text, arguments, false, false); }},
    {"format", formatted},
    {"index", [](const std::string& text, const Arguments& arguments) { return place_of(text, arguments, false, true); }},
    {"isalpha",
     [](const std::string& text, const Arguments&) {
       return all_are(text, [](const unicode::CodePoint& c) { return (c.classes & unicode::kLetter) != 0; });
     }},
    {"isdigit",
     [](const std::string& text, const Arguments&) {
       return all_are(text,
                      [](const unicode::CodePoint& c) { return unicode::kCategories[unicode::category_of(c.value)] == "Nd"; });
     }},
    {"isspace", [](const std::string& text, const Arguments&) { return Value(!text.empty() && unicode::strip(text).empty()); }},
    {"join", joined_by},
    {"lower", [](const std::string& text, const Arguments&) { return Value(lowered(text)); }},
    {"lstrip", [](const std::string& text, const Arguments& arguments) { return stripped(text, arguments, true, false); }},
    {"partition", [](const std::string& text, const Arguments& arguments) { return parted(text, arguments, false); }},
    {"removeprefix",
     [](const std::string& text, const Arguments& arguments) {
       const std::string& part = text_at(arguments, 0, "prefix", "removeprefix");
       return Value(text.starts_with(part) ? text.substr(part.size()) : text);
     }},
    {"removesuffix",
     [](const std::string& text, const Arguments& arguments) {
       const std::string& part = text_at(arguments, 0, "suffix", "removesuffix");
       return Value(text.ends_with(part) ? text.substr(0, text.size() - part.size()) : text);
     }},
    {"replace", replaced},
    {"rfind", [](const std::string& text, const Arguments& arguments) { return place_of(text, arguments, true, false); }},
    {"rpartition", [](const std::string& text, const Arguments& arguments) { return parted(text, arguments, true); }},
    {"rsplit", [](const std::string& text, const Arguments& arguments) { return split(text, arguments, true); }},
    {"rstrip", [](const std::string& text, const Arguments& arguments) { return stripped(text, arguments, false, true); }},
    {"split", [](const std::string& text, const Arguments& arguments) { return split(text, arguments, false); }},
    {"splitlines", lines_of},
    {"startswith",
     [](const std::string& text, const Arguments& arguments) { return Value(begins_or_ends(text, arguments, true)); }},
    {"strip", [](const std::string& text, const Arguments& arguments) { return stripped(text, arguments, true, true); }},
    {"title", titled_by_python},
    {"upper", [](const std::string& text, const Arguments&) { return Value(uppered(text)); }},
};

const std::pair<std::string_view, Method>* find_method(std::string_view name) {
  const auto* const found =
      std::find_if(std::begin(kMethods), std::end(kMethods), [&](const auto& entry) { return entry.first == name; });
  return found != std::end(kMethods) ? found : nullptr;
}

}  // namespace

Value text_method(const Value& text, std::string_view name) {
  const auto* const found = find_method(name);
  if (found == nullptr) return {};
  return Value(Function([text, method = found->second](const Arguments& arguments) { return method(*text.text(), arguments); }),
               &text);
}

Value call_text_method(const std::string& text, std::string_view name, const Arguments& arguments) {
  return find_method(name)->second(text, arguments);
}

std::string lowered(std::string_view text) {
  refuse_other_letters(text);
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(), down);
  return out;
}

std::string uppered(std::string_view text) {
  refuse_other_letters(text);
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(), up);
  return out;
}

std::string titled(std::string_view text) {
  std::string out = lowered(text);
  bool begins = true;
  for (char& c : out) {
    if (begins) c = up(c);
    begins = c == '-' || c == '(' || c == '{' || c == '[' || c == '<' ||
             (static_cast<unsigned char>(c) <= ' ' && unicode::strip({&c, 1}).empty());
  }
  return out;
}

}  // namespace qlorapp::jinja
