// SPDX-License-Identifier: Apache-2.0
#include "json/python_json.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <vector>

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "core/printable.hpp"

namespace qlorapp::format {
namespace {

/// Decodes the character at `at` and moves behind it. Overlong forms, surrogates and values beyond U+10FFFF are refused.
char32_t next_character(std::string_view text, size_t& at) {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0U; };
  const unsigned first = byte(at);
  const size_t length = first < 0x80                    ? 1
                        : first >= 0xc2 && first < 0xe0 ? 2
                        : first >= 0xe0 && first < 0xf0 ? 3
                        : first >= 0xf0 && first < 0xf5 ? 4
                                                        : 0;
  char32_t character = length == 1 ? first : first & (0x7fU >> length);
  bool valid = length != 0;
  for (size_t i = 1; i < length; ++i) {
    valid = valid && (byte(at + i) & 0xc0U) == 0x80U;
    character = (character << 6) | (byte(at + i) & 0x3fU);
  }
  valid = valid && !(length == 3 && (character < 0x800 || (character >= 0xd800 && character < 0xe000))) &&
          !(length == 4 && (character < 0x10000 || character > 0x10ffff));
  QLORAPP_CHECK_VALUE(valid, "[json] strings must be UTF-8; got {}. Encode the text as UTF-8.", printable(text));
  at += length;
  return character;
}

void append_escape(std::string& out, char32_t unit) {
  static constexpr char kHex[] = "0123456789abcdef";
  out += "\\u";
  for (int shift = 12; shift >= 0; shift -= 4) out += kHex[(unit >> shift) & 15U];
}

class Writer {
 public:
  explicit Writer(const PythonJsonStyle& style) : style_(style) {}

  void write(const Json& value, int level) {
    switch (value.type()) {
      case Json::value_t::null:
        out += "null";
        break;
      case Json::value_t::boolean:
        out += value.get<bool>() ? "true" : "false";
        break;
      case Json::value_t::number_integer:
        out += std::to_string(value.get<int64_t>());
        break;
      case Json::value_t::number_unsigned:
        out += std::to_string(value.get<uint64_t>());
        break;
      case Json::value_t::number_float:
        out += python_float_repr(value.get<double>());
        break;
      case Json::value_t::string:
        append_json_string(out, value.get_ref<const std::string&>(), style_.ensure_ascii);
        break;
      case Json::value_t::array:
        write_array(value.get_ref<const Json::array_t&>(), level);
        break;
      case Json::value_t::object:
        write_object(value.get_ref<const Json::object_t&>(), level);
        break;
      default:
        throw ValueError("[json] binary values have no JSON form. Write numbers, strings, lists or objects.");
    }
  }

  std::string out;

 private:
  void write_array(const Json::array_t& items, int level) {
    if (items.empty()) {
      out += "[]";
      return;
    }
    out += '[';
    for (size_t i = 0; i < items.size(); ++i) {
      separate(i, level + 1);
      write(items[i], level + 1);
    }
    close(']', level);
  }

  void write_object(const Json::object_t& members, int level) {
    if (members.empty()) {
      out += "{}";
      return;
    }
    std::vector<const Json::object_t::value_type*> order;
    for (const auto& member : members) order.push_back(&member);
    // UTF-8 sorts as its code points do, which is how Python compares strings.
    if (style_.sort_keys) std::stable_sort(order.begin(), order.end(), [](auto* a, auto* b) { return a->first < b->first; });
    out += '{';
    for (size_t i = 0; i < order.size(); ++i) {
      separate(i, level + 1);
      append_json_string(out, order[i]->first, style_.ensure_ascii);
      out += ": ";
      write(order[i]->second, level + 1);
    }
    close('}', level);
  }

  void separate(size_t index, int level) {
    if (index > 0) out += style_.indent < 0 ? ", " : ",";
    new_line(level);
  }
  void close(char bracket, int level) {
    new_line(level);
    out += bracket;
  }
  void new_line(int level) {
    if (style_.indent < 0) return;
    out += '\n';
    out.append(static_cast<size_t>(style_.indent) * static_cast<size_t>(level), ' ');
  }

  const PythonJsonStyle& style_;
};

}  // namespace

void append_json_string(std::string& out, std::string_view text, bool ensure_ascii) {
  out += '"';
  for (size_t at = 0; at < text.size();) {
    const size_t begin = at;
    const char32_t character = next_character(text, at);
    switch (character) {
      case '"':
        out += "\\\"";
        break;
      case '\\':
        out += "\\\\";
        break;
      case '\n':
        out += "\\n";
        break;
      case '\r':
        out += "\\r";
        break;
      case '\t':
        out += "\\t";
        break;
      case '\f':
        out += "\\f";
        break;
      case '\b':
        out += "\\b";
        break;
      default:
        if (character < 0x20 || (ensure_ascii && character >= 0x7f && character < 0x10000)) {
          append_escape(out, character);
        } else if (ensure_ascii && character >= 0x10000) {
          append_escape(out, 0xd800 + ((character - 0x10000) >> 10));
          append_escape(out, 0xdc00 + ((character - 0x10000) & 0x3ff));
        } else {
          out += text.substr(begin, at - begin);
        }
    }
  }
  out += '"';
}

std::string python_float_repr(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  char buffer[40];
  // d[.ddd]e±XX with the shortest digits that read back
  const std::string_view text(
      buffer,
      static_cast<size_t>(std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::scientific).ptr - buffer));
  const size_t e = text.find('e');
  int exponent = 0;
  std::from_chars(text.data() + e + (text[e + 1] == '+' ? 2 : 1), text.data() + text.size(), exponent);
  if (exponent < -4 || exponent >= 16) return std::string(text);  // to_chars also writes at least two digits of exponent
  std::string out(text.starts_with('-') ? "-" : "");
  std::string digits;
  for (const char c : text.substr(0, e)) {
    if (c >= '0' && c <= '9') digits += c;
  }
  if (exponent < 0) return out + "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + digits;
  const size_t whole = static_cast<size_t>(exponent) + 1;
  if (digits.size() <= whole) return out + digits + std::string(whole - digits.size(), '0') + ".0";
  return out + digits.substr(0, whole) + "." + digits.substr(whole);
}

std::string dump_python_json(const Json& value, const PythonJsonStyle& style) {
  Writer writer(style);
  writer.write(value, 0);
  return std::move(writer.out);
}

}  // namespace qlorapp::format
