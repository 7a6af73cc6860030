// SPDX-License-Identifier: Apache-2.0
#include "nfc.hpp"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "unicode.hpp"

namespace qlorapp {
namespace {

using unicode::Decomposition;

// Hangul: Unicode 16, section 3.12.
constexpr uint32_t kSyllables = 0xAC00, kLeads = 0x1100, kVowels = 0x1161, kTails = 0x11A7;
constexpr uint32_t kLeadCount = 19, kVowelCount = 21, kTailCount = 28;

struct Tables {
  std::unordered_map<uint32_t, const Decomposition*> decompositions;
  std::unordered_map<uint64_t, uint32_t> compositions;
  std::unordered_map<uint32_t, uint8_t> classes;
  std::unordered_set<uint32_t> unstable;  ///< What may change or be changed: all others stay as they are beside each other.

  Tables() {
    for (std::size_t i = 0; i < unicode::kCombiningRangeCount; ++i) {
      const auto& range = unicode::kCombiningRanges[i];
      for (uint32_t c = range.first; c <= range.last; ++c) {
        classes.emplace(c, range.combining_class);
        unstable.insert(c);
      }
    }
    for (std::size_t i = 0; i < unicode::kDecompositionCount; ++i) {
      const Decomposition& parts = unicode::kDecompositions[i];
      decompositions.emplace(parts.code_point, &parts);
      if (parts.composes != 0) {
        compositions.emplace(key(parts.first, parts.second), parts.code_point);
        unstable.insert(parts.second);
      } else {
        unstable.insert(parts.code_point);
      }
    }
    for (uint32_t i = 0; i < kVowelCount; ++i) unstable.insert(kVowels + i);
    for (uint32_t i = 1; i < kTailCount; ++i) unstable.insert(kTails + i);
  }

  static uint64_t key(uint32_t first, uint32_t second) { return (uint64_t{first} << 32) | second; }

  [[nodiscard]] uint8_t class_of(uint32_t c) const {
    if (c < 0x300) return 0;
    const auto found = classes.find(c);
    return found == classes.end() ? uint8_t{0} : found->second;
  }

  /// @returns the character that the two make together, or 0.
  [[nodiscard]] uint32_t compose(uint32_t first, uint32_t second) const {
    if (first - kLeads < kLeadCount && second - kVowels < kVowelCount) {
      return kSyllables + ((first - kLeads) * kVowelCount + (second - kVowels)) * kTailCount;
    }
    const uint32_t syllable = first - kSyllables;
    if (syllable < kLeadCount * kVowelCount * kTailCount && syllable % kTailCount == 0 && second > kTails &&
        second < kTails + kTailCount) {
      return first + (second - kTails);
    }
    const auto found = compositions.find(key(first, second));
    return found == compositions.end() ? 0 : found->second;
  }
};

const Tables& tables() {
  static const Tables instance;
  return instance;
}

/// A character on its way, and how many characters of the text it stands for (0 for the later parts of a decomposed one).
struct Part {
  uint32_t value;
  uint32_t count;
  uint8_t combining_class;
};

void decompose(uint32_t c, uint32_t count, std::vector<Part>& out) {
  const Tables& known = tables();
  if (const uint32_t syllable = c - kSyllables; syllable < kLeadCount * kVowelCount * kTailCount) {
    out.push_back({kLeads + syllable / (kVowelCount * kTailCount), count, 0});
    out.push_back({kVowels + syllable / kTailCount % kVowelCount, 0, 0});
    if (syllable % kTailCount != 0) out.push_back({kTails + syllable % kTailCount, 0, 0});
    return;
  }
  const auto found = known.decompositions.find(c);
  if (found == known.decompositions.end()) {
    out.push_back({c, count, known.class_of(c)});
    return;
  }
  decompose(found->second->first, count, out);
  if (found->second->second != 0) decompose(found->second->second, 0, out);
}

std::vector<Part> decomposed(const std::vector<unicode::CodePoint>& text) {
  std::vector<Part> out;
  out.reserve(text.size() + 16);
  for (const auto& c : text) decompose(c.value, 1, out);
  const auto is_starter = [](const Part& part) { return part.combining_class == 0; };
  for (auto run = out.begin(); run != out.end();) {
    run = std::find_if_not(run, out.end(), is_starter);
    const auto end = std::find_if(run, out.end(), is_starter);
    std::stable_sort(run, end, [](const Part& a, const Part& b) { return a.combining_class < b.combining_class; });
    run = end;
  }
  return out;
}

/// Composes in place: a mark joins the last starter unless one of its own or a higher class stands between.
void compose(std::vector<Part>& parts) {
  constexpr std::size_t kNone = static_cast<std::size_t>(-1);
  std::size_t starter = kNone, kept = 0;
  int last_class = -1;  // of what was kept behind the starter; -1: nothing
  for (const Part& part : parts) {
    if (starter != kNone && last_class < static_cast<int>(part.combining_class)) {
      if (const uint32_t both = tables().compose(parts[starter].value, part.value); both != 0) {
        parts[starter].value = both;
        parts[starter].count += part.count;
        continue;
      }
    }
    const std::size_t at = kept++;
    parts[at] = part;
    if (part.combining_class == 0) {
      starter = at;
      last_class = -1;
    } else {
      last_class = part.combining_class;
    }
  }
  parts.resize(kept);
}

}  // namespace

void to_nfc(AlignedText& text) {
  const std::string_view given = text.section().text;
  const auto below = [](char c) { return static_cast<uint8_t>(c) < 0xCC; };  // U+0300 begins with this byte
  if (std::all_of(given.begin(), given.end(), below)) return;
  const std::vector<unicode::CodePoint> characters = unicode::decode(given);
  const auto& unstable = tables().unstable;
  const auto changes = [&](const unicode::CodePoint& c) { return c.value >= 0x300 && unstable.contains(c.value); };
  if (std::none_of(characters.begin(), characters.end(), changes)) return;

  std::vector<Part> parts = decomposed(characters);
  compose(parts);
  std::string out;
  std::vector<Origin> origins;
  out.reserve(given.size());
  origins.reserve(given.size());
  std::size_t next = 0;  // character of the text
  const auto end_of = [&](std::size_t i) { return i + 1 < characters.size() ? characters[i + 1].offset : given.size(); };
  for (const Part& part : parts) {
    // A part that stands for no character of its own shares the one before; so does Hugging Face's NormalizedString.
    const std::size_t from = part.count != 0 || next == 0 ? next : next - 1;
    const std::size_t begin = characters[from].offset, end = end_of(from), before = out.size();
    unicode::append_utf8(out, part.value);
    const bool same = part.count == 1 && part.value == characters[from].value;
    const TextRange whole = text.section().range(begin, end);
    for (std::size_t i = 0; before + i < out.size(); ++i) {
      const TextRange range = same ? text.section().range(begin + i, begin + i + 1) : whole;
      origins.push_back({static_cast<uint32_t>(range.begin), static_cast<uint32_t>(range.end)});
    }
    next += part.count;
  }
  text.assign(std::move(out), std::move(origins));
}

}  // namespace qlorapp
