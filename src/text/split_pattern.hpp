// SPDX-License-Identifier: Apache-2.0
/// The regular expressions with which a tokenizer.json splits text, as far as published ones need them. Torch-free.
///
/// Known: characters, classes with \p{L}, \p{Lu} …, \s \d \w, . and ranges, groups with |, (?:…), (?i:…) of contractions, look-ahead
/// (?=…) (?!…), $, and the quantifiers ? * + {m,n}, also possessive. A group may be optional but not repeated, and a pattern may not match
/// nothing, so a match costs time linear in its length for every published pattern; the steps of one text are counted, and too many are an error.
/// Meaning: Oniguruma's Ruby syntax, which Hugging Face's tokenizers use ($ is the end of a line).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "unicode.hpp"

namespace qlorapp {

/// Half-open range of indices into the decoded text.
struct Piece {
  std::size_t begin, end;
};

/// A set of code points.
class CharacterSet {
 public:
  void add(uint32_t first, uint32_t last) { ranges_.emplace_back(first, last); }
  void add_categories(uint32_t mask) { categories_ |= mask; }
  void add_white_space(bool complement) { (complement ? no_space_ : space_) = true; }
  void negate() { negated_ = !negated_; }
  /// Call once, after the last change.
  void finish();

  [[nodiscard]] bool contains(const unicode::CodePoint& c) const {
    return c.value < ascii_.size() ? ascii_[c.value] : has(c.value, c.classes);
  }

 private:
  [[nodiscard]] bool has(uint32_t code_point, uint8_t classes) const;

  std::vector<std::pair<uint32_t, uint32_t>> ranges_;
  uint32_t categories_ = 0;  ///< Bit i: unicode::kCategories[i].
  bool space_ = false, no_space_ = false, negated_ = false;
  std::array<bool, 128> ascii_{};
};

class SplitPattern {
 public:
  /// @returns null for an expression that is not known, with the reason in `why`.
  [[nodiscard]] static std::shared_ptr<const SplitPattern> parse(std::string_view expression, std::string& why);

  /// Appends the matches in text[range], from the left, and with `keep_gaps` what is between them. Look-ahead ends with the range.
  /// @throws ValueError where the pattern and the text together cost too many steps.
  void split(const std::vector<unicode::CodePoint>& text, Piece range, bool keep_gaps, std::vector<Piece>& out) const;

  /// Whether no match holds an ASCII letter and a space or line feed behind it.
  [[nodiscard]] bool respects_word_ends() const { return respects_word_ends_; }
  /// Whether each ASCII letter is in a match, so that with the above every text is cut behind a word.
  [[nodiscard]] bool cuts_word_ends() const { return respects_word_ends_ && takes_letters_; }

 private:
  friend class SplitPatternReader;
  struct Node {
    enum class Kind { kSet, kAlternatives, kAhead, kNotAhead, kLineEnd, kMatch };
    Kind kind = Kind::kMatch;
    int next = -1;
    int set = -1;  ///< kSet, repeated at least `least` and at most `most` times.
    std::size_t least = 1, most = 1;
    bool possessive = false;
    std::vector<int> alternatives = {};  ///< Each goes on with `next` by itself; of a look-ahead one, which ends in kMatch.
  };
  class Matcher;

  void look_at_words();

  std::vector<Node> nodes_;
  std::vector<CharacterSet> sets_;
  int start_ = -1;
  bool respects_word_ends_ = false, takes_letters_ = false;
};

}  // namespace qlorapp
