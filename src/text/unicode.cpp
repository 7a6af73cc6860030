// SPDX-License-Identifier: Apache-2.0
#include "unicode.hpp"

#include <array>
#include <map>
#include <span>

namespace qlorapp::unicode {
namespace {

constexpr std::size_t kPageSize = 256;
constexpr std::size_t kPageCount = 0x110000 / kPageSize;

/// The ranges spread over pages of 256 code points, equal pages stored once: about 60 KB.
struct Pages {
  std::array<uint16_t, kPageCount> page_of{};
  std::vector<std::array<uint8_t, kPageSize>> pages;

  /// @param alternating  this value stands for 0 and 1 in turn.
  Pages(std::span<const ClassRange> ranges, uint8_t otherwise, uint8_t alternating) {
    std::map<std::array<uint8_t, kPageSize>, uint16_t> known;
    auto range = ranges.begin();
    for (std::size_t page = 0; page < kPageCount; ++page) {
      std::array<uint8_t, kPageSize> classes{};
      for (std::size_t i = 0; i < kPageSize; ++i) {
        const std::size_t c = page * kPageSize + i;
        while (range != ranges.end() && range->last < c) ++range;
        const bool inside = range != ranges.end() && range->first <= c;
        classes[i] = !inside                         ? otherwise
                     : range->classes != alternating ? range->classes
                                                     : static_cast<uint8_t>((c - range->first) % 2);
      }
      const auto [entry, added] = known.emplace(classes, static_cast<uint16_t>(pages.size()));
      if (added) pages.push_back(classes);
      page_of[page] = entry->second;
    }
  }

  [[nodiscard]] uint8_t at(uint32_t code_point) const { return pages[page_of[code_point / kPageSize]][code_point % kPageSize]; }
};

/// Result of looking at one sequence: how many bytes belong together, and whether they are well formed.
struct Sequence {
  std::size_t length;
  bool valid;
};

/// `text` is not empty. For ill-formed input, length is that of the maximal subpart that starts a well-formed sequence (≥ 1).
Sequence read_sequence(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return {1, true};
  const std::size_t length = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4) return {1, false};
  uint8_t low = 0x80, high = 0xBF;  // of the second byte; excludes overlong forms, surrogates and values above U+10FFFF
  if (lead == 0xE0) low = 0xA0;
  if (lead == 0xED) high = 0x9F;
  if (lead == 0xF0) low = 0x90;
  if (lead == 0xF4) high = 0x8F;
  for (std::size_t i = 1; i < length; ++i) {
    if (i >= text.size() || byte(i) < low || byte(i) > high) return {i, false};
    low = 0x80;
    high = 0xBF;
  }
  return {length, true};
}

uint32_t value_of(std::string_view text, std::size_t length) {
  static constexpr uint8_t kLeadMask[] = {0, 0x7F, 0x1F, 0x0F, 0x07};
  uint32_t value = static_cast<uint8_t>(text[0]) & kLeadMask[length];
  for (std::size_t i = 1; i < length; ++i) value = (value << 6) | (static_cast<uint8_t>(text[i]) & 0x3Fu);
  return value;
}

bool is_stripped(uint32_t c) { return (classes_of(c) & kSpace) != 0 || (c >= 0x1C && c <= 0x1F); }

}  // namespace

uint8_t classes_of(uint32_t code_point) {
  static const Pages table({kClassRanges, kClassRangeCount}, 0, 255);
  return table.at(code_point);
}

uint8_t category_of(uint32_t code_point) {
  constexpr uint8_t kUnassigned = 28, kAlternating = 29;
  static const Pages table({kCategoryRanges, kCategoryRangeCount}, kUnassigned, kAlternating);
  return table.at(code_point);
}

std::size_t first_invalid_utf8(std::string_view text) {
  for (std::size_t i = 0; i < text.size();) {
    const auto [length, valid] = read_sequence(text.substr(i));
    if (!valid) return i;
    i += length;
  }
  return std::string_view::npos;
}

std::vector<CodePoint> decode(std::string_view text) {
  std::vector<CodePoint> out;
  out.reserve(text.size());
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t length = read_sequence(text.substr(i)).length;
    const uint32_t value = value_of(text.substr(i), length);
    out.push_back({value, static_cast<uint32_t>(i), classes_of(value)});
    i += length;
  }
  return out;
}

void append_lossy(std::string& out, std::string_view bytes) {
  for (std::size_t i = 0; i < bytes.size();) {
    const auto [length, valid] = read_sequence(bytes.substr(i));
    if (valid) out.append(bytes, i, length);
    else out += "\xEF\xBF\xBD";
    i += length;
  }
}

std::size_t length_at(std::string_view text) {
  std::size_t i = 1;
  while (i < text.size() && (static_cast<uint8_t>(text[i]) & 0xC0) == 0x80) ++i;
  return i;
}

std::size_t last_code_point(std::string_view text) {
  std::size_t i = text.size() - 1;
  while (i > 0 && (static_cast<uint8_t>(text[i]) & 0xC0) == 0x80) --i;
  return i;
}

void append_utf8(std::string& out, uint32_t code_point) {
  const auto put = [&](uint32_t byte) { out += static_cast<char>(static_cast<uint8_t>(byte)); };
  if (code_point < 0x80) {
    put(code_point);
  } else if (code_point < 0x800) {
    put(0xC0 | (code_point >> 6));
    put(0x80 | (code_point & 0x3F));
  } else if (code_point < 0x10000) {
    put(0xE0 | (code_point >> 12));
    put(0x80 | ((code_point >> 6) & 0x3F));
    put(0x80 | (code_point & 0x3F));
  } else {
    put(0xF0 | (code_point >> 18));
    put(0x80 | ((code_point >> 12) & 0x3F));
    put(0x80 | ((code_point >> 6) & 0x3F));
    put(0x80 | (code_point & 0x3F));
  }
}

std::string_view strip(std::string_view text) {
  while (!text.empty()) {
    const auto [length, valid] = read_sequence(text);
    if (!valid || !is_stripped(value_of(text, length))) break;
    text.remove_prefix(length);
  }
  while (!text.empty()) {
    const std::string_view last = text.substr(last_code_point(text));
    const auto [length, valid] = read_sequence(last);
    if (!valid || length != last.size() || !is_stripped(value_of(last, length))) break;
    text.remove_suffix(length);
  }
  return text;
}

}  // namespace qlorapp::unicode
