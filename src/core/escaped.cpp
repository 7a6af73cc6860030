// SPDX-License-Identifier: Apache-2.0
#include "core/escaped.hpp"

#include <array>
#include <cstdint>
#include <cstdio>

namespace qlorapp {
namespace {

struct Character {
  size_t bytes = 0;  ///< 0: ill-formed.
  uint32_t value = 0;
};

Character first_of(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  if (byte(0) < 0x80) return {1, byte(0)};
  const size_t bytes = byte(0) >= 0xF0 ? 4 : byte(0) >= 0xE0 ? 3 : 2;
  if (byte(0) < 0xC2 || byte(0) > 0xF4 || text.size() < bytes) return {};
  uint32_t value = byte(0) & (0xFFu >> (bytes + 1));
  for (size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return {};
    value = value << 6 | (byte(i) & 0x3F);
  }
  constexpr std::array<uint32_t, 5> kLeast{0, 0, 0x80, 0x800, 0x10000};
  const bool is_surrogate = value >= 0xD800 && value < 0xE000;
  return value < kLeast[bytes] || value > 0x10FFFF || is_surrogate ? Character{} : Character{bytes, value};
}

bool is_control(uint32_t c) {
  return (c < 0x20 && c != '\t' && c != '\n') || (c >= 0x7F && c < 0xA0) || (c >= 0x202A && c <= 0x202E) ||
         (c >= 0x2066 && c <= 0x2069) || c == 0x2028 || c == 0x2029;
}

std::string escape(std::string_view text, bool is_line) {
  std::string out;
  out.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    const Character c = first_of(text.substr(at));
    std::array<char, 12> written{};
    if (c.bytes == 0 || (is_control(c.value) && c.value < 0x100)) {
      const unsigned value = c.bytes == 0 ? static_cast<uint8_t>(text[at]) : c.value;
      std::snprintf(written.data(), written.size(), "\\x%02x", value);
      out += written.data();
    } else if (is_control(c.value)) {
      std::snprintf(written.data(), written.size(), "\\u%04x", static_cast<unsigned>(c.value));
      out += written.data();
    } else if (is_line && c.value == '\n') {
      out += "\\n";
    } else {
      out += text.substr(at, c.bytes);
    }
    at += c.bytes == 0 ? 1 : c.bytes;
  }
  return out;
}

}  // namespace

std::string escaped(std::string_view text) { return escape(text, false); }
std::string escaped_line(std::string_view text) { return escape(text, true); }

}  // namespace qlorapp
