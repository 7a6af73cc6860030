// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/json/json.hpp"

#include <cctype>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "json_cursor.hpp"
#include "json_tree.hpp"

namespace qlorapp::format {
namespace {

/// Python's literals are no JSON, and the parser has no switch for them. Each is overwritten by a number of the same length;
/// `end` is the offset behind it, by which the number's event is recognized.
struct NonfiniteLiteral {
  size_t end;
  double value;
};

std::vector<NonfiniteLiteral> take_nonfinite_literals(std::string& text) {
  struct Spelling {
    std::string_view literal, number;
    double value;
  };
  static constexpr double kInfinity = std::numeric_limits<double>::infinity();
  static constexpr Spelling kSpellings[] = {{"NaN", "0.0", std::numeric_limits<double>::quiet_NaN()},
                                            {"Infinity", "0.000000", kInfinity},
                                            {"-Infinity", "-0.000000", -kInfinity}};
  const auto separates = [](char c) {
    return c == ',' || c == ':' || c == '[' || c == ']' || c == '{' || c == '}' || c == ' ' || c == '\t' || c == '\n' || c == '\r';
  };
  std::vector<NonfiniteLiteral> taken;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    if (in_string) {
      if (text[i] == '\\') ++i;
      else if (text[i] == '"') in_string = false;
      continue;
    }
    if (text[i] == '"') {
      in_string = true;
      continue;
    }
    for (const Spelling& spelling : kSpellings) {
      if (text.compare(i, spelling.literal.size(), spelling.literal) != 0) continue;
      const size_t end = i + spelling.literal.size();
      if ((i > 0 && !separates(text[i - 1])) || (end < text.size() && !separates(text[end]))) continue;
      text.replace(i, spelling.literal.size(), spelling.number);
      taken.push_back({end, spelling.value});
      i = end - 1;
      break;
    }
  }
  return taken;
}

/// Builds the value while it is read.
class Builder {
 public:
  Builder(std::string_view where, const JsonLimits& limits, std::vector<NonfiniteLiteral> nonfinite, const size_t& position)
      : where_(where), limits_(limits), nonfinite_(std::move(nonfinite)), position_(position) {}

  Json take() { return tree_.take(); }

  bool null() { return put(nullptr); }
  bool boolean(bool value) { return put(value); }
  bool number_integer(int64_t value) { return put(value); }
  bool number_unsigned(uint64_t value) {
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      if (!limits_.allow_big_integers) fail("integers must fit in a signed 64-bit integer; got {}", value);
      return put(value);
    }
    return put(static_cast<int64_t>(value));
  }
  bool number_float(double value, const std::string& text) {
    if (next_nonfinite_ < nonfinite_.size() && nonfinite_[next_nonfinite_].end <= position_) {
      return put(nonfinite_[next_nonfinite_++].value);
    }
    if (!limits_.allow_big_integers && text.find_first_of(".eE") == std::string::npos) {
      fail("integers must fit in a signed 64-bit integer; got {}", text.substr(0, 40));
    }
    return put(value);
  }
  bool string(std::string& value) { return put(std::move(value)); }
  bool binary(std::vector<uint8_t>&) { return false; }

  bool start_object(size_t) { return open(Json::object()); }
  bool key(std::string& name) {
    if (!tree_.add_key(name)) fail("keys must be unique within an object; got {} twice", printable(name));
    return true;
  }
  bool end_object() {
    tree_.close();
    return true;
  }
  bool start_array(size_t) { return open(Json::array()); }
  bool end_array() { return end_object(); }

  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception& error) {
    fail_parse(where_, position, error);
  }

 private:
  bool put(Json&& value) {
    tree_.put(std::move(value));
    return true;
  }
  bool open(Json&& container) {
    if (tree_.depth() >= limits_.max_depth) fail("values may be nested at most {} deep; got deeper ones", limits_.max_depth);
    tree_.open(std::move(container));
    return true;
  }
  template <class... Args>
  [[noreturn]] void fail(Format<Args...> text, Args&&... args) const {
    throw FormatError(
        message("[{}] {}, at byte {}. Write the file again.", where_, message(text, std::forward<Args>(args)...), position_));
  }

  std::string_view where_;
  const JsonLimits& limits_;
  std::vector<NonfiniteLiteral> nonfinite_;
  size_t next_nonfinite_ = 0;
  const size_t& position_;
  JsonTree<Json> tree_;
};

}  // namespace

Json parse_json(std::string_view text, std::string_view where, const JsonLimits& limits) {
  QLORAPP_CHECK_FORMAT(text.size() <= limits.max_bytes, "[{}] JSON may have at most {} bytes; got {}. The file is of another kind.",
                       where, limits.max_bytes, text.size());
  refuse_bytes_outside_json(text, where);
  std::string rewritten;
  std::vector<NonfiniteLiteral> nonfinite;
  if (limits.allow_nonfinite) {
    rewritten = text;
    nonfinite = take_nonfinite_literals(rewritten);
    text = rewritten;
  }
  size_t position = 0;
  Builder builder(where, limits, std::move(nonfinite), position);
  JsonCursor::parse(text, position, builder);
  return builder.take();
}

}  // namespace qlorapp::format
