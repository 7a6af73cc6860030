// SPDX-License-Identifier: Apache-2.0
#include "format/yaml.hpp"

#include <initializer_list>
#include <set>
#include <utility>

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "core/printable.hpp"
#include "format/yaml_text.hpp"

namespace qlorapp::format {
namespace {

using Kind = YamlNode::Kind;

constexpr size_t kMaxBytes = size_t{1} << 20;
constexpr int64_t kMaxDepth = 64;

/// By recursive descent: block collections by the column that they begin in, flow collections by their brackets.
class YamlParser : YamlText {
 public:
  using YamlText::YamlText;

  YamlNode document() {
    skip_to_content();
    begin_document();
    skip_to_content();
    if (at_end()) return {.line = 1, .column = 1};
    YamlNode root = node(-1, 0);
    skip_to_content();
    if (!at_end()) fail("a value ends before this text. Check its indentation, or put text over several lines into one line");
    return root;
  }

 private:
  /// What begins here: a block list or mapping, a flow collection, or a scalar, which ends its line.
  /// @param parent  the column of the collection that it belongs to; -1: none.
  YamlNode node(int64_t parent, int64_t depth) {
    check_depth(depth);
    const int64_t own = column();
    if (is_indicator('-')) return block_list(own, depth);
    if (is_indicator('?')) fail("complex keys (? key) are not read");
    YamlNode first = inline_value(parent, depth);
    skip_spaces();
    if (!is_colon()) {
      end_line();
      return first;
    }
    if (!first.is_scalar()) fail("a key must be text, not a list or a mapping");
    return block_mapping(std::move(first), own, depth);
  }

  YamlNode block_list(int64_t own, int64_t depth) {
    YamlNode list = here(Kind::kList);
    while (!at_end() && column() == own && is_indicator('-')) {
      advance();
      skip_spaces();
      list.items.push_back(in_line() ? node(own, depth + 1) : node_below(own, /*list_at_own_column=*/false, depth));
      skip_to_content();
    }
    if (!at_end() && column() > own) fail_indentation();
    return list;
  }

  YamlNode block_mapping(YamlNode first, int64_t own, int64_t depth) {
    YamlNode mapping{.kind = Kind::kMapping, .line = first.line, .column = first.column};
    std::set<std::string> names;
    for (YamlNode key = std::move(first);;) {
      add_key(mapping, names, key);
      advance();
      skip_spaces();
      mapping.items.push_back(in_line() ? value_behind_key(own, depth) : node_below(own, /*list_at_own_column=*/true, depth));
      skip_to_content();
      if (at_end() || column() < own) return mapping;
      if (column() > own) fail_indentation();
      if (is_indicator('-')) fail("a list cannot begin among the keys of a mapping");
      if (is_indicator('?')) fail("complex keys (? key) are not read");
      key = scalar(/*in_flow=*/false);
      skip_spaces();
      if (!is_colon()) fail("a key must be followed by ': '");
    }
  }

  /// On the key's own line.
  YamlNode value_behind_key(int64_t own, int64_t depth) {
    if (is_indicator('-')) fail("a list must begin on a line of its own, or stand in brackets: [a, b]");
    YamlNode value = inline_value(own, depth);
    skip_spaces();
    if (is_colon()) fail("a second ': ' in one line: put the text into quotes");
    end_line();
    return value;
  }

  /// On the lines below a key or a dash, if there is anything for it.
  YamlNode node_below(int64_t own, bool list_at_own_column, int64_t depth) {
    YamlNode nothing = here(Kind::kPlain);
    skip_to_content();
    if (at_end()) return nothing;
    if (column() > own || (list_at_own_column && column() == own && is_indicator('-'))) return node(own, depth + 1);
    return nothing;
  }

  YamlNode inline_value(int64_t parent, int64_t depth) {
    if (peek() == '[') return flow_list(parent, depth + 1);
    if (peek() == '{') return flow_mapping(parent, depth + 1);
    return scalar(/*in_flow=*/false);
  }

  YamlNode flow_list(int64_t parent, int64_t depth) {
    check_depth(depth);
    YamlNode list = here(Kind::kList);
    advance();
    for (skip_in_flow(parent); peek() != ']';) {
      list.items.push_back(flow_value(parent, depth));
      skip_in_flow(parent);
      if (peek() == ':') fail("a mapping in a list needs braces: [{{key: value}}]");
      next_in_flow(']', parent);
    }
    advance();
    return list;
  }

  YamlNode flow_mapping(int64_t parent, int64_t depth) {
    check_depth(depth);
    YamlNode mapping = here(Kind::kMapping);
    std::set<std::string> names;
    advance();
    for (skip_in_flow(parent); peek() != '}';) {
      if (peek() == '[' || peek() == '{') fail("a key must be text, not a list or a mapping");
      const YamlNode key = scalar(/*in_flow=*/true);
      const bool quoted = key.kind == Kind::kQuoted;
      skip_spaces();
      if (peek() != ':' || !(quoted || is_colon())) fail("a key must be followed by ': '");
      add_key(mapping, names, key);
      advance();
      skip_in_flow(parent);
      const bool is_missing = peek() == ',' || peek() == '}';
      mapping.items.push_back(is_missing ? here(Kind::kPlain) : flow_value(parent, depth));
      skip_in_flow(parent);
      next_in_flow('}', parent);
    }
    advance();
    return mapping;
  }

  YamlNode flow_value(int64_t parent, int64_t depth) {
    if (peek() == '[') return flow_list(parent, depth + 1);
    if (peek() == '{') return flow_mapping(parent, depth + 1);
    return scalar(/*in_flow=*/true);
  }

  /// Behind a value of a flow collection: a comma, or its end.
  void next_in_flow(char end, int64_t parent) {
    if (peek() == end) return;
    if (peek() != ',') fail("expected ',' or '{}'", std::string_view(&end, 1));
    advance();
    skip_in_flow(parent);
  }

  YamlNode scalar(bool in_flow) {
    const bool quoted = peek() == '"' || peek() == '\'';
    YamlNode node = here(quoted ? Kind::kQuoted : Kind::kPlain);
    node.text = quoted ? quoted_text() : plain_text(in_flow);
    return node;
  }

  void add_key(YamlNode& mapping, std::set<std::string>& names, const YamlNode& key) const {
    if (key.kind == Kind::kPlain && key.text == "<<") fail_at(key, "merge keys (<<) are not read");
    if (!names.insert(key.text).second) fail_at(key, "the key {} is there already", printable(key.text, 60));
    mapping.keys.push_back({key.text, key.line, key.column});
  }

  template <class... Args>
  [[noreturn]] void fail_at(const YamlNode& node, Format<Args...> text, Args&&... args) const {
    fail_at_place({node.line, node.column}, message(text, std::forward<Args>(args)...));
  }
  [[noreturn]] void fail_indentation() const {
    fail("deeper than the line that it belongs to: align it, or put text over several lines into one line");
  }
  void check_depth(int64_t depth) const {
    if (depth > kMaxDepth) fail("values may be nested at most {} deep", kMaxDepth);
  }
  [[nodiscard]] YamlNode here(Kind kind) const {
    const YamlPlace place = this->place();
    return {.kind = kind, .line = place.line, .column = place.column};
  }
};

bool is_one_of(std::string_view text, std::initializer_list<std::string_view> words) {
  for (const std::string_view word : words) {
    if (text == word) return true;
  }
  return false;
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }

}  // namespace

bool YamlNode::is_null() const { return kind == Kind::kPlain && is_one_of(text, {"", "~", "null", "Null", "NULL"}); }

YamlNode parse_yaml(std::string_view text, std::string_view where) {
  QLORAPP_CHECK_FORMAT(text.size() <= kMaxBytes, "[{}] YAML may have at most {} bytes; got {}. The file is of another kind.", where,
                       kMaxBytes, text.size());
  return YamlParser(text, where).document();
}

bool is_yaml_number(std::string_view text) {
  size_t i = 0;
  const auto digits = [&] {
    const size_t begin = i;
    while (i < text.size() && is_digit(text[i])) ++i;
    return i - begin;
  };
  if (i < text.size() && (text[i] == '-' || text[i] == '+')) ++i;
  const size_t first = i, whole = digits();
  if (whole > 1 && text[first] == '0') return false;  // octal to some
  size_t fraction = 0;
  if (i < text.size() && text[i] == '.') {
    ++i;
    fraction = digits();
  }
  if (whole + fraction == 0) return false;
  if (i < text.size() && (text[i] == 'e' || text[i] == 'E')) {
    ++i;
    if (i < text.size() && (text[i] == '-' || text[i] == '+')) ++i;
    if (digits() == 0) return false;
  }
  return i == text.size();
}

Json untyped_json(const YamlNode& node, std::string_view where) {
  if (node.kind == Kind::kList) {
    Json list = Json::array();
    for (const YamlNode& item : node.items) list.push_back(untyped_json(item, where));
    return list;
  }
  if (node.kind == Kind::kMapping) {
    Json object = Json::object();
    auto& entries = object.get_ref<Json::object_t&>();
    for (size_t i = 0; i < node.keys.size(); ++i) entries.emplace_back(node.keys[i].text, untyped_json(node.items[i], where));
    return object;
  }
  const std::string& text = node.text;
  if (node.kind == Kind::kQuoted) return text;
  if (node.is_null()) return nullptr;
  if (is_one_of(text, {"true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON"})) return true;
  if (is_one_of(text, {"false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF"})) return false;
  if (is_yaml_number(text)) {
    std::string json = text.substr(text[0] == '+' ? 1 : 0);  // JSON's spelling: no plus, digits around the point
    const size_t point = json.find('.');
    if (point != std::string::npos) {
      if (point + 1 == json.size() || !is_digit(json[point + 1])) json.insert(point + 1, "0");
      if (point == 0 || !is_digit(json[point - 1])) json.insert(point, "0");
    }
    return parse_json(json, message("{}, line {}, column {}", where, node.line, node.column));
  }
  const bool looks_like_number =
      is_digit(text[0]) ||
      ((text[0] == '-' || text[0] == '+' || text[0] == '.') && text.size() > 1 &&
       (is_digit(text[1]) || text[1] == '.' || is_one_of(text.substr(1), {"inf", "Inf", "INF", "nan", "NaN", "NAN"})));
  QLORAPP_CHECK_FORMAT(!looks_like_number && text != "=",
                       "[{}] line {}, column {}: readers of YAML disagree on {}. Write a decimal number, or text in quotes.", where,
                       node.line, node.column, printable(text, 60));
  return text;
}

}  // namespace qlorapp::format
