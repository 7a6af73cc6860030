// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

#include "builtins.hpp"
#include "core/check.hpp"
#include "syntax.hpp"
#include "text/unicode.hpp"
#include "text_methods.hpp"

namespace qlorapp::jinja {
namespace {

bool flag(const Arguments& arguments, std::size_t position, std::string_view name, bool standard) {
  const Value* const given = arguments.find(position, name);
  return given != nullptr ? given->truth() : standard;
}

std::string text_or(const Arguments& arguments, std::size_t position, std::string_view name, std::string standard) {
  const Value* const given = arguments.find(position, name);
  return given != nullptr ? given->str() : std::move(standard);
}

/// `attribute` of map, selectattr and others: names and indices with points between them.
Value at_path(Value value, std::string_view path) {
  while (!path.empty()) {
    const std::size_t point = std::min(path.find('.'), path.size());
    const std::string_view part = path.substr(0, point);
    int64_t index = 0;
    const bool number = std::from_chars(part.data(), part.data() + part.size(), index).ptr == part.data() + part.size();
    value = number ? item_of(value, Value(index)) : item_of(value, Value(part));
    path.remove_prefix(std::min(point + 1, path.size()));
  }
  return value;
}

Arguments rest(const Arguments& arguments, std::size_t from) {
  Arguments out;
  for (std::size_t i = from; i < arguments.values.size(); ++i) out.values.push_back(arguments.values[i]);
  out.named = arguments.named;
  return out;
}

/// The key by which Jinja sorts and compares: texts without case unless told.
Value key_of(const Value& value, bool with_case, const std::string& attribute) {
  Value key = attribute.empty() ? value : at_path(value, attribute);
  if (!with_case && key.text() != nullptr) return lowered(*key.text());
  return key;
}

/// A generator, as Jinja returns here: it is true, has no length, and can be iterated once.
Value lazy(List items) { return Sequence{std::move(items), false, nullptr, 1, std::make_shared<bool>(false)}; }

Value list_of(const Value& value, const Arguments&) { return value.iterated()->items; }

Value sort(const Value& value, const Arguments& arguments) {
  List items = value.iterated()->items;
  const bool reverse = flag(arguments, 0, "reverse", false), with_case = flag(arguments, 1, "case_sensitive", false);
  const std::string attribute = text_or(arguments, 2, "attribute", "");
  std::stable_sort(items.begin(), items.end(), [&](const Value& a, const Value& b) {
    const Value x = key_of(a, with_case, attribute), y = key_of(b, with_case, attribute);
    return reverse ? Value::less(y, x) : Value::less(x, y);
  });
  return items;
}

Value dictsort(const Value& value, const Arguments& arguments) {
  if (value.dict() == nullptr) throw Failure("dictsort needs a dict");
  const bool with_case = flag(arguments, 0, "case_sensitive", false), by_value = text_or(arguments, 1, "by", "key") == "value",
             reverse = flag(arguments, 2, "reverse", false);
  List items;
  for (const auto& [key, entry] : value.dict()->entries) items.emplace_back(List{key, entry}, true);
  std::stable_sort(items.begin(), items.end(), [&](const Value& a, const Value& b) {
    const std::size_t part = by_value ? 1 : 0;
    const Value x = key_of(a.sequence()->items[part], with_case, ""), y = key_of(b.sequence()->items[part], with_case, "");
    return reverse ? Value::less(y, x) : Value::less(x, y);
  });
  return items;
}

Value items_of(const Value& value, const Arguments&) {
  List out;
  if (value.dict() == nullptr && value.is_undefined()) return lazy(std::move(out));
  if (value.dict() == nullptr) throw Failure("Can only get item pairs from a mapping.");
  for (const auto& [key, entry] : value.dict()->entries) out.emplace_back(List{key, entry}, true);
  return lazy(std::move(out));
}

Value tojson(const Value& value, const Arguments& arguments) {
  JsonStyle style;
  style.ascii = flag(arguments, 0, "ensure_ascii", false);
  if (const Value* const indent = arguments.find(1, "indent"); indent != nullptr && !indent->is_none())
    style.indent = static_cast<int>(std::clamp<int64_t>(indent->whole(), 0, 64));
  style.sorted = flag(arguments, 3, "sort_keys", false);
  if (const Value* const given = arguments.find(2, "separators");
      given != nullptr && given->sequence() != nullptr && given->sequence()->items.size() == 2) {
    style.between = given->sequence()->items[0].str();
    style.behind_key = given->sequence()->items[1].str();
  } else if (style.indent >= 0) {
    style.between = ",";
  }
  return json_of(value, style);
}

Value map(const Value& value, const Arguments& arguments) {
  List out;
  const Value* const attribute = arguments.values.empty() ? arguments.find(0, "attribute") : nullptr;
  const auto all = value.iterated();
  for (const Value& item : all->items) {
    if (attribute == nullptr) {
      if (arguments.values.empty()) throw Failure("map requires a filter argument");
      const std::string name = arguments.values[0].str();
      if (!has_filter(name)) throw Failure(message("No filter named '{}'.", name));
      out.push_back(filtered(name, item, rest(arguments, 1)));
      continue;
    }
    Value found = at_path(item, attribute->str());
    if (const Value* const standard = arguments.find(1, "default"); standard != nullptr && found.is_undefined()) found = *standard;
    out.push_back(std::move(found));
  }
  return lazy(std::move(out));
}

/// select, reject, selectattr, rejectattr.
Value chosen(const Value& value, const Arguments& arguments, bool wanted, bool by_attribute) {
  List out;
  const std::size_t test = by_attribute ? 1 : 0;
  if (arguments.values.size() < test) throw Failure("Missing parameter for attribute name");
  const auto all = value.iterated();
  for (const Value& item : all->items) {
    const Value asked = by_attribute ? at_path(item, arguments.values[0].str()) : item;
    bool holds = asked.truth();
    if (arguments.values.size() > test) {
      const std::string name = arguments.values[test].str();
      if (!has_test(name)) throw Failure(message("No test named '{}'.", name));
      holds = tested(name, asked, rest(arguments, test + 1));
    }
    if (holds == wanted) out.push_back(item);
  }
  return lazy(std::move(out));
}

Value join(const Value& value, const Arguments& arguments) {
  const std::string between = text_or(arguments, 0, "d", ""), attribute = text_or(arguments, 1, "attribute", "");
  std::string out;
  bool first = true;
  const auto all = value.iterated();
  for (const Value& item : all->items) {
    if (!first) out += between;
    first = false;
    out += (attribute.empty() ? item : at_path(item, attribute)).str();
    if (out.size() > kLongestText) throw Failure("the text is too long");
  }
  return out;
}

Value to_int(const Value& value, const Arguments& arguments) {
  if (arguments.find(1, "base") != nullptr) throw Failure("int is computed here in base 10");
  int64_t out = 0;
  if (value.as_integer(out)) return out;
  if (value.real() != nullptr && std::abs(*value.real()) < 9e18) return static_cast<int64_t>(*value.real());
  if (value.text() != nullptr) {
    const std::string_view text = unicode::strip(*value.text());
    double real = 0;
    if (!text.empty() &&
        std::from_chars(text.data() + (text[0] == '+' ? 1 : 0), text.data() + text.size(), out).ptr == text.data() + text.size())
      return out;
    if (!text.empty() && std::from_chars(text.data(), text.data() + text.size(), real).ptr == text.data() + text.size() &&
        std::abs(real) < 9e18)
      return static_cast<int64_t>(real);
  }
  const Value* const standard = arguments.find(0, "default");
  return standard != nullptr ? *standard : Value(0);
}

Value to_float(const Value& value, const Arguments& arguments) {
  if (value.is_number()) return value.as_real();
  if (value.text() != nullptr) {
    const std::string_view text = unicode::strip(*value.text());
    double real = 0;
    const char* const begin = text.data() + (text.starts_with('+') ? 1 : 0);
    if (!text.empty() && std::from_chars(begin, text.data() + text.size(), real).ptr == text.data() + text.size()) return real;
  }
  const Value* const standard = arguments.find(0, "default");
  return standard != nullptr ? *standard : Value(0.0);
}

Value indent(const Value& value, const Arguments& arguments) {
  const Value* const width = arguments.find(0, "width");
  const std::string before = width == nullptr ? "    "
                             : width->text() != nullptr
                                 ? *width->text()
                                 : std::string(static_cast<std::size_t>(std::clamp<int64_t>(width->whole(), 0, 1000)), ' ');
  const bool first = flag(arguments, 1, "first", false), blank = flag(arguments, 2, "blank", false);
  const Value lines = call_text_method(value.str() + "\n", "splitlines", {});
  std::string out;
  bool is_first = true;
  for (const Value& line : lines.sequence()->items) {
    if (!is_first) out += '\n';
    if (is_first ? first : blank || !line.text()->empty()) out += before;
    is_first = false;
    out += *line.text();
    if (out.size() > kLongestText) throw Failure("the text is too long");
  }
  return out;
}

Value extreme(const Value& value, const Arguments& arguments, bool largest) {
  const std::shared_ptr<const Sequence> all = value.iterated();
  const bool with_case = flag(arguments, 0, "case_sensitive", false);
  const std::string attribute = text_or(arguments, 1, "attribute", "");
  if (all->items.empty()) return Value::undefined("No aggregated item, sequence was empty.");
  const Value* best = all->items.data();
  for (const Value& item : all->items) {
    const Value a = key_of(item, with_case, attribute), b = key_of(*best, with_case, attribute);
    if (largest ? Value::less(b, a) : Value::less(a, b)) best = &item;
  }
  return *best;
}

Value unique(const Value& value, const Arguments& arguments) {
  const bool with_case = flag(arguments, 0, "case_sensitive", false);
  const std::string attribute = text_or(arguments, 1, "attribute", "");
  List out, keys;
  const auto all = value.iterated();
  for (const Value& item : all->items) {
    Value key = key_of(item, with_case, attribute);
    if (std::find(keys.begin(), keys.end(), key) != keys.end()) continue;
    keys.push_back(std::move(key));
    out.push_back(item);
  }
  return lazy(std::move(out));
}

Value rounded(const Value& value, const Arguments& arguments) {
  const Value* const digits = arguments.find(0, "precision");
  const std::string method = text_or(arguments, 1, "method", "common");
  const int64_t precision = digits != nullptr ? digits->whole() : 0;
  if (value.integer() != nullptr && method == "common" && precision >= 0) return value;
  if (!value.is_number() || precision < 0 || precision > 20) throw Failure("round is computed here for numbers and 0 to 20 digits");
  if (method == "common") {  // by the value as it is, not times a power of ten
    std::array<char, 400> buffer{};
    const auto written = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value.as_real(), std::chars_format::fixed,
                                       static_cast<int>(precision));
    double out = 0;
    std::from_chars(buffer.data(), written.ptr, out);
    return out;
  }
  const double factor = std::pow(10.0, static_cast<double>(precision)), scaled = value.as_real() * factor;
  return (method == "ceil" ? std::ceil(scaled) : std::floor(scaled)) / factor;
}

Value first_of(const Value& value, const Arguments&) {
  const auto all = value.iterated();
  return all->items.empty() ? Value::undefined("No first item, sequence was empty.") : all->items.front();
}

Value last_of(const Value& value, const Arguments&) {
  const auto all = value.iterated();
  return all->items.empty() ? Value::undefined("No last item, sequence was empty.") : all->items.back();
}

Value reversed(const Value& value, const Arguments&) {
  List items = value.iterated()->items;
  std::reverse(items.begin(), items.end());
  if (value.text() == nullptr) return lazy(std::move(items));
  std::string out;
  for (const Value& item : items) out += *item.text();
  return out;
}

Value standard(const Value& value, const Arguments& arguments) {
  if (!value.is_undefined() && (!flag(arguments, 1, "boolean", false) || value.truth())) return value;
  const Value* const given = arguments.find(0, "default_value");
  return given != nullptr ? *given : Value("");
}

Value summed(const Value& value, const Arguments& arguments) {
  const std::string attribute = text_or(arguments, 0, "attribute", "");
  const Value* const start = arguments.find(1, "start");
  Value out = start != nullptr ? *start : Value(0);
  const auto all = value.iterated();
  for (const Value& item : all->items) out = computed("+", out, attribute.empty() ? item : at_path(item, attribute));
  return out;
}

Value escaped(const Value& value, const Arguments&) {
  std::string out;
  for (const char c : value.str()) {
    if (c == '&') out += "&amp;";
    else if (c == '<') out += "&lt;";
    else if (c == '>') out += "&gt;";
    else if (c == '"') out += "&#34;";
    else if (c == '\'') out += "&#39;";
    else out += c;
  }
  return out;
}

/// A method of texts as a filter over what is written as text.
template <const char* kMethod>
Value of_text(const Value& value, const Arguments& arguments) {
  return value.text() != nullptr ? call_text_method(*value.text(), kMethod, arguments)
                                 : call_text_method(value.str(), kMethod, arguments);
}
constexpr char kUpper[] = "upper", kLower[] = "lower", kCapitalize[] = "capitalize", kStrip[] = "strip", kReplace[] = "replace";

/// A text without white space around it is not copied: it may be long.
Value trimmed(const Value& value, const Arguments& arguments) {
  const bool plain = value.text() != nullptr && arguments.find(0, "chars") == nullptr;
  return plain && unicode::strip(*value.text()).size() == value.text()->size() ? value : of_text<kStrip>(value, arguments);
}

using Filter = Value (*)(const Value&, const Arguments&);
using Test = bool (*)(const Value&, const Arguments&);

constexpr std::pair<std::string_view, Filter> kFilters[] = {
    {"abs",
     [](const Value& value, const Arguments&) {
       int64_t number = 0;
       if (value.as_integer(number)) return number < 0 ? computed("-", 0, number) : Value(number);
       if (value.real() == nullptr) throw Failure(message("bad operand type for abs(): '{}'", value.type_name()));
       return Value(std::abs(*value.real()));
     }},
    {"capitalize", of_text<kCapitalize>},
    {"count", [](const Value& value, const Arguments&) { return Value(value.length()); }},
    {"d", standard},
    {"default", standard},
    {"dictsort", dictsort},
    {"e", escaped},
    {"escape", escaped},
    {"first", first_of},
    {"float", to_float},
    {"forceescape", escaped},
    {"format",
     [](const Value& value, const Arguments& arguments) { return computed("%", value.str(), Value(arguments.values, true)); }},
    {"indent", indent},
    {"int", to_int},
    {"items", items_of},
    {"join", join},
    {"last", last_of},
    {"length", [](const Value& value, const Arguments&) { return Value(value.length()); }},
    {"list", list_of},
    {"lower", of_text<kLower>},
    {"map", map},
    {"max", [](const Value& value, const Arguments& arguments) { return extreme(value, arguments, true); }},
    {"min", [](const Value& value, const Arguments& arguments) { return extreme(value, arguments, false); }},
    {"reject", [](const Value& value, const Arguments& arguments) { return chosen(value, arguments, false, false); }},
    {"rejectattr", [](const Value& value, const Arguments& arguments) { return chosen(value, arguments, false, true); }},
    {"replace", of_text<kReplace>},
    {"reverse", reversed},
    {"round", rounded},
    {"safe", [](const Value& value, const Arguments&) { return Value(value.str()); }},
    {"select", [](const Value& value, const Arguments& arguments) { return chosen(value, arguments, true, false); }},
    {"selectattr", [](const Value& value, const Arguments& arguments) { return chosen(value, arguments, true, true); }},
    {"sort", sort},
    {"string", [](const Value& value, const Arguments&) { return Value(value.str()); }},
    {"sum", summed},
    {"title", [](const Value& value, const Arguments&) { return Value(titled(value.str())); }},
    {"tojson", tojson},
    {"trim", trimmed},
    {"unique", unique},
    {"upper", of_text<kUpper>},
};

int64_t remainder_of(const Value& value, int64_t divisor) { return computed("%", value.whole(), divisor).whole(); }

bool is_sized(const Value& value) { return value.text() != nullptr || value.sequence() != nullptr || value.dict() != nullptr; }
const Value& other(const Arguments& arguments) {
  if (arguments.values.empty()) throw Failure("the test needs a value to compare with");
  return arguments.values[0];
}

constexpr auto kEqual = [](const Value& value, const Arguments& arguments) { return value == other(arguments); };
constexpr auto kUnequal = [](const Value& value, const Arguments& arguments) { return !(value == other(arguments)); };
constexpr auto kLess = [](const Value& value, const Arguments& arguments) { return Value::less(value, other(arguments)); };
constexpr auto kGreater = [](const Value& value, const Arguments& arguments) { return Value::less(other(arguments), value); };

constexpr std::pair<std::string_view, Test> kTests[] = {
    {"!=", kUnequal},
    {"<", kLess},
    {"==", kEqual},
    {">", kGreater},
    {"boolean", [](const Value& value, const Arguments&) { return value.boolean() != nullptr; }},
    {"callable", [](const Value& value, const Arguments&) { return value.function() != nullptr; }},
    {"defined", [](const Value& value, const Arguments&) { return !value.is_undefined(); }},
    {"divisibleby",
     [](const Value& value, const Arguments& arguments) { return remainder_of(value, other(arguments).whole()) == 0; }},
    {"eq", kEqual},
    {"equalto", kEqual},
    {"even", [](const Value& value, const Arguments&) { return remainder_of(value, 2) == 0; }},
    {"false", [](const Value& value, const Arguments&) { return value.boolean() != nullptr && !*value.boolean(); }},
    {"filter", [](const Value& value, const Arguments&) { return has_filter(value.str()); }},
    {"float", [](const Value& value, const Arguments&) { return value.real() != nullptr; }},
    {"ge", [](const Value& value, const Arguments& arguments) { return !Value::less(value, other(arguments)); }},
    {"greaterthan", kGreater},
    {"gt", kGreater},
    {"in", [](const Value& value, const Arguments& arguments) { return contains(other(arguments), value); }},
    {"integer", [](const Value& value, const Arguments&) { return value.integer() != nullptr; }},
    {"iterable", [](const Value& value, const Arguments&) { return is_sized(value) || value.is_undefined(); }},
    {"le", [](const Value& value, const Arguments& arguments) { return !Value::less(other(arguments), value); }},
    {"lessthan", kLess},
    {"lower", [](const Value& value,
                 const Arguments&) { return value.str() == lowered(value.str()) && value.str() != uppered(value.str()); }},
    {"lt", kLess},
    {"mapping", [](const Value& value, const Arguments&) { return value.dict() != nullptr; }},
    {"ne", kUnequal},
    {"none", [](const Value& value, const Arguments&) { return value.is_none(); }},
    {"number", [](const Value& value, const Arguments&) { return value.is_number(); }},
    {"odd", [](const Value& value, const Arguments&) { return remainder_of(value, 2) == 1; }},
    {"sameas",
     [](const Value& value, const Arguments& arguments) {
       return value.type_name() == other(arguments).type_name() && value == other(arguments);
     }},
    {"sequence", [](const Value& value, const Arguments&) { return is_sized(value) || value.is_undefined(); }},
    {"string", [](const Value& value, const Arguments&) { return value.text() != nullptr; }},
    {"test", [](const Value& value, const Arguments&) { return has_test(value.str()); }},
    {"true", [](const Value& value, const Arguments&) { return value.boolean() != nullptr && *value.boolean(); }},
    {"undefined", [](const Value& value, const Arguments&) { return value.is_undefined(); }},
    {"upper", [](const Value& value,
                 const Arguments&) { return value.str() == uppered(value.str()) && value.str() != lowered(value.str()); }},
};

template <class Table>
auto found_in(const Table& table, std::string_view name) {
  return std::find_if(std::begin(table), std::end(table), [&](const auto& entry) { return entry.first == name; });
}

}  // namespace

bool has_filter(std::string_view name) { return found_in(kFilters, name) != std::end(kFilters); }
bool has_test(std::string_view name) { return found_in(kTests, name) != std::end(kTests); }

Value filtered(std::string_view name, const Value& value, const Arguments& arguments) {
  return found_in(kFilters, name)->second(value, arguments);
}

bool tested(std::string_view name, const Value& value, const Arguments& arguments) {
  return found_in(kTests, name)->second(value, arguments);
}

}  // namespace qlorapp::jinja
