// SPDX-License-Identifier: Apache-2.0
#include "value.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

#include "core/check.hpp"
#include "text/unicode.hpp"

namespace qlorapp::jinja {

const Value* Dict::find(std::string_view key) const {
  for (const auto& [name, value] : entries) {
    if (name.text() != nullptr && *name.text() == key) return &value;
  }
  return nullptr;
}

const Value* Dict::look_up(const Value& key) const {
  if (key.text() != nullptr) return find(*key.text());
  for (const auto& [name, value] : entries) {
    if (name == key) return &value;
  }
  return nullptr;
}

void Dict::set(std::string_view key, Value value) {
  const auto held = std::find_if(entries.begin(), entries.end(),
                                 [&](const auto& entry) { return entry.first.text() != nullptr && *entry.first.text() == key; });
  if (held != entries.end()) held->second = std::move(value);
  else entries.emplace_back(key, std::move(value));
}

const Value* Arguments::find(std::size_t position, std::string_view name) const {
  if (position < values.size()) return &values[position];
  for (const auto& [key, value] : named) {
    if (key == name) return &value;
  }
  return nullptr;
}

namespace {

constexpr int kDeepestValue = 200;

thread_local int64_t comparisons_left = 0;

void count_comparison() {
  if (--comparisons_left < 0) throw Failure("it compares too many values");
}

int checked(int depth) {
  if (depth > kDeepestValue) throw Failure(message("lists and dicts stand in each other beyond {} levels", kDeepestValue));
  return depth;
}

}  // namespace

Value::Value(Sequence sequence) {
  for (const Value& item : sequence.items) sequence.depth = std::max(sequence.depth, checked(1 + item.depth()));
  data_ = std::make_shared<const Sequence>(std::move(sequence));
}

Value::Value(Dict dict) {
  for (const auto& [key, value] : dict.entries)
    dict.depth = std::max(dict.depth, checked(1 + std::max(key.depth(), value.depth())));
  data_ = std::make_shared<const Dict>(std::move(dict));
}

Value::Value(Function function, const Value* holds)
    : data_(std::make_shared<const Callable>(Callable{std::move(function), checked(1 + (holds != nullptr ? holds->depth() : 0))})) {
}

void Value::Namespace::set(std::string_view key, Value value) {
  attributes.depth = std::max(attributes.depth, checked(1 + value.depth()));
  attributes.set(key, std::move(value));
}

int Value::depth() const {
  if (sequence() != nullptr) return sequence()->depth;
  if (dict() != nullptr) return dict()->depth;
  if (space() != nullptr) return space()->attributes.depth;
  const Callable* const held = pointed<std::shared_ptr<const Callable>>();
  return held != nullptr ? held->depth : 0;
}

void allow_comparisons(int64_t count) { comparisons_left = count; }

Value Value::undefined(std::string what) {
  Value out;
  out.data_ = Undefined{std::make_shared<const std::string>(std::move(what))};
  return out;
}

Value Value::of(const Row& json) {
  switch (json.type()) {
    case Row::value_t::boolean:
      return json.get<bool>();
    case Row::value_t::number_integer:
      return json.get<int64_t>();
    case Row::value_t::number_unsigned:
      if (json.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) throw Failure("a number goes beyond 64 bits");
      return json.get<int64_t>();
    case Row::value_t::number_float:
      return json.get<double>();
    case Row::value_t::string:
      return json.get_ref<const std::string&>();
    case Row::value_t::array: {
      List items;
      items.reserve(json.size());
      for (const Row& item : json) items.push_back(of(item));
      return items;
    }
    case Row::value_t::object: {
      Dict dict;
      dict.entries.reserve(json.size());
      for (const auto& [key, value] : json.items()) dict.entries.emplace_back(key, of(value));
      return dict;
    }
    default:
      return None{};
  }
}

bool Value::truth() const {
  if (is_undefined() || is_none()) return false;
  if (boolean() != nullptr) return *boolean();
  if (integer() != nullptr) return *integer() != 0;
  if (real() != nullptr) return *real() != 0;
  if (text() != nullptr) return !text()->empty();
  if (sequence() != nullptr) return sequence()->taken != nullptr || !sequence()->items.empty();
  if (dict() != nullptr) return !dict()->entries.empty();
  return true;
}

std::string written(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  std::array<char, 40> buffer{};
  const double size = std::abs(value);
  const bool scientific = size != 0 && (size < 1e-4 || size >= 1e16);
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value,
                                 scientific ? std::chars_format::scientific : std::chars_format::fixed)
                       .ptr;
  std::string out(buffer.data(), end);
  if (!scientific && out.find('.') == std::string::npos) out += ".0";
  return out;
}

namespace {

/// As Python spells a text.
std::string python_text(std::string_view text) {
  const char quote = text.find('\'') != std::string_view::npos && text.find('"') == std::string_view::npos ? '"' : '\'';
  std::string out(1, quote);
  for (const unicode::CodePoint& point : unicode::decode(text)) {
    const uint32_t c = point.value;
    const std::string_view category = unicode::kCategories[unicode::category_of(c)];
    if (c == static_cast<unsigned char>(quote) || c == '\\') out += {'\\', static_cast<char>(c)};
    else if (c == '\n') out += "\\n";
    else if (c == '\r') out += "\\r";
    else if (c == '\t') out += "\\t";
    else if (c == ' ' || (category[0] != 'C' && category[0] != 'Z')) unicode::append_utf8(out, c);
    else out += c < 0x100 ? message("\\x{:02x}", c) : c < 0x10000 ? message("\\u{:04x}", c) : message("\\U{:08x}", c);
  }
  return out += quote;
}

std::string json_text(std::string_view text, bool ascii) {
  std::string out = "\"";
  for (const unicode::CodePoint& point : unicode::decode(text)) {
    const uint32_t c = point.value;
    if (c == '"' || c == '\\') out += {'\\', static_cast<char>(c)};
    else if (c == '\n') out += "\\n";
    else if (c == '\r') out += "\\r";
    else if (c == '\t') out += "\\t";
    else if (c == '\b') out += "\\b";
    else if (c == '\f') out += "\\f";
    else if (c < 0x20 || (ascii && c >= 0x7f && c < 0x10000)) out += message("\\u{:04x}", c);
    else if (ascii && c >= 0x10000)
      out += message("\\u{:04x}\\u{:04x}", 0xd800 + ((c - 0x10000) >> 10), 0xdc00 + ((c - 0x10000) & 0x3ff));
    else unicode::append_utf8(out, c);
  }
  return out += '"';
}

void write_json(std::string& out, const Value& value, const JsonStyle& style, int level) {
  if (out.size() > kLongestText) throw Failure("the text is too long");
  if (value.sequence() != nullptr && value.sequence()->taken != nullptr)
    throw Failure("Object of type generator is not JSON serializable");
  const auto line = [&](int depth) {
    if (style.indent >= 0) out += "\n" + std::string(static_cast<std::size_t>(style.indent) * static_cast<std::size_t>(depth), ' ');
  };
  if (value.is_none()) out += "null";
  else if (value.boolean() != nullptr) out += *value.boolean() ? "true" : "false";
  else if (value.integer() != nullptr) out += std::to_string(*value.integer());
  else if (value.real() != nullptr)
    out += std::isnan(*value.real())   ? "NaN"
           : std::isinf(*value.real()) ? (*value.real() < 0 ? "-Infinity" : "Infinity")
                                       : written(*value.real());
  else if (value.text() != nullptr) out += json_text(*value.text(), style.ascii);
  else if (value.sequence() != nullptr) {
    out += '[';
    bool first = true;
    for (const Value& item : value.sequence()->items) {
      if (!first) out += style.between;
      first = false;
      line(level + 1);
      write_json(out, item, style, level + 1);
    }
    if (!first) line(level);
    out += ']';
  } else if (value.dict() != nullptr) {
    std::vector<std::pair<std::string, const Value*>> entries;
    for (const auto& [key, entry] : value.dict()->entries) {
      if (key.text() != nullptr) entries.emplace_back(*key.text(), &entry);
      else if (key.is_none() || key.is_number()) entries.emplace_back(json_of(key, style), &entry);
      else throw Failure(message("keys must be str, int, float, bool or None, not {}", key.type_name()));
    }
    if (style.sorted) std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    out += '{';
    bool first = true;
    for (const auto& [key, entry] : entries) {
      if (!first) out += style.between;
      first = false;
      line(level + 1);
      out += json_text(key, style.ascii) + style.behind_key;
      write_json(out, *entry, style, level + 1);
    }
    if (!first) line(level);
    out += '}';
  } else {
    throw Failure(message("Object of type {} is not JSON serializable", value.type_name()));
  }
}

}  // namespace

std::string json_of(const Value& value, const JsonStyle& style) {
  std::string out;
  write_json(out, value, style, 0);
  return out;
}

std::string Value::str() const {
  if (text() != nullptr) return *text();
  if (is_undefined()) return {};
  return repr();
}

std::string Value::repr() const {
  if (is_undefined()) return "Undefined";
  if (is_none()) return "None";
  if (boolean() != nullptr) return *boolean() ? "True" : "False";
  if (integer() != nullptr) return std::to_string(*integer());
  if (real() != nullptr) return written(*real());
  if (text() != nullptr) return python_text(*text());
  if (const Sequence* const all = sequence()) {
    if (all->taken != nullptr) throw Failure("a generator cannot be written as text");
    std::string out = all->view != nullptr ? std::string(all->view) + '(' : std::string();
    out += all->is_tuple ? '(' : '[';
    for (std::size_t i = 0; i < all->items.size(); ++i) {
      out += (i > 0 ? ", " : "") + all->items[i].repr();
      if (out.size() > kLongestText) throw Failure("the text is too long");
    }
    if (all->is_tuple && all->items.size() == 1) out += ',';
    out += all->is_tuple ? ')' : ']';
    return all->view != nullptr ? out + ')' : out;
  }
  if (const Dict* const all = dict()) {
    std::string out = "{";
    for (std::size_t i = 0; i < all->entries.size(); ++i) {
      out += (i > 0 ? ", " : "") + all->entries[i].first.repr() + ": " + all->entries[i].second.repr();
      if (out.size() > kLongestText) throw Failure("the text is too long");
    }
    return out += '}';
  }
  throw Failure(message("a {} cannot be written as text", type_name()));
}

std::string Value::what() const {
  const auto* const held = std::get_if<Undefined>(&data_);
  return held != nullptr && held->what != nullptr ? *held->what : "a value";
}

std::string_view Value::type_name() const {
  constexpr std::array<std::string_view, 11> kNames{"Undefined", "NoneType", "bool",      "int",      "float",      "str",
                                                    "list",      "dict",     "Namespace", "function", "LoopContext"};
  if (sequence() != nullptr && sequence()->is_tuple) return "tuple";
  return kNames[data_.index()];
}

double Value::as_real() const {
  if (real() != nullptr) return *real();
  int64_t whole = 0;
  (void)as_integer(whole);
  return static_cast<double>(whole);
}

bool Value::as_integer(int64_t& out) const {
  if (integer() != nullptr) out = *integer();
  else if (boolean() != nullptr) out = *boolean() ? 1 : 0;
  else return false;
  return true;
}

int64_t Value::whole() const {
  int64_t out = 0;
  if (!as_integer(out)) throw Failure(message("'{}' object cannot be interpreted as an integer", type_name()));
  return out;
}

std::shared_ptr<const Sequence> Value::iterated() const {
  if (auto all = shared_sequence()) {
    if (all->taken == nullptr) return all;
    return std::exchange(*all->taken, true) ? std::make_shared<const Sequence>() : all;
  }
  Sequence out;
  if (dict() != nullptr) {
    for (const auto& [key, value] : dict()->entries) out.items.push_back(key);
  } else if (text() != nullptr) {
    for (const std::string_view character : characters(*text())) out.items.emplace_back(character);
  } else if (!is_undefined()) {
    throw Failure(message("'{}' object is not iterable", type_name()));
  }
  return std::make_shared<const Sequence>(std::move(out));
}

int64_t Value::length() const {
  if (is_undefined()) return 0;
  if (text() != nullptr) return character_count(*text());
  if (sequence() != nullptr && sequence()->taken == nullptr) return static_cast<int64_t>(sequence()->items.size());
  if (dict() != nullptr) return static_cast<int64_t>(dict()->entries.size());
  throw Failure(message("object of type '{}' has no len()", type_name()));
}

bool operator==(const Value& a, const Value& b) {
  count_comparison();
  if (a.is_number() && b.is_number()) {
    int64_t x = 0, y = 0;
    return a.as_integer(x) && b.as_integer(y) ? x == y : a.as_real() == b.as_real();
  }
  if (a.data_.index() != b.data_.index()) return false;
  if (a.is_undefined() || a.is_none()) return true;
  if (a.text() != nullptr) return *a.text() == *b.text();
  if (a.sequence() != nullptr)
    return a.sequence() == b.sequence() ||
           (a.sequence()->is_tuple == b.sequence()->is_tuple && a.sequence()->items == b.sequence()->items);
  if (a.dict() != nullptr) {
    if (a.dict()->entries.size() != b.dict()->entries.size()) return false;
    return std::all_of(a.dict()->entries.begin(), a.dict()->entries.end(), [&](const auto& entry) {
      const Value* const other = b.dict()->look_up(entry.first);
      return other != nullptr && *other == entry.second;
    });
  }
  return a.space() == b.space() && a.function() == b.function() && a.loop() == b.loop();
}

bool Value::less(const Value& a, const Value& b) {
  count_comparison();
  if (a.is_number() && b.is_number()) {
    int64_t x = 0, y = 0;
    return a.as_integer(x) && b.as_integer(y) ? x < y : a.as_real() < b.as_real();
  }
  if (a.text() != nullptr && b.text() != nullptr) return *a.text() < *b.text();  // UTF-8 keeps the order of code points
  if (a.sequence() != nullptr && b.sequence() != nullptr && a.sequence()->is_tuple == b.sequence()->is_tuple) {
    return std::lexicographical_compare(a.sequence()->items.begin(), a.sequence()->items.end(), b.sequence()->items.begin(),
                                        b.sequence()->items.end(), less);
  }
  throw Failure(message("'<' not supported between instances of '{}' and '{}'", a.type_name(), b.type_name()));
}

std::vector<std::string_view> characters(std::string_view text) {
  std::vector<std::string_view> out;
  out.reserve(text.size());
  while (!text.empty()) {
    const std::size_t bytes = unicode::length_at(text);
    out.push_back(text.substr(0, bytes));
    text.remove_prefix(bytes);
  }
  return out;
}

int64_t character_count(std::string_view text) {
  return std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; });
}

}  // namespace qlorapp::jinja
