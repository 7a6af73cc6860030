// SPDX-License-Identifier: Apache-2.0
/// Text that a tokenizer has changed, and where each of its bytes comes from. Torch-free.
///
/// Labels depend on which characters a token stands for, so every change keeps the origins. The rules are those of Hugging
/// Face's NormalizedString (tokenizer/normalizer.rs): what is put in front belongs to the first character, what replaces a match
/// to the match's last one.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "qlorapp/text/tokenizer.hpp"

namespace qlorapp {

/// Bytes [begin, end) of the text that was given; that text is shorter than 1 GiB.
struct Origin {
  uint32_t begin, end;
};

/// A view of a part of a text.
struct Section {
  std::string_view text;
  const Origin* origins = nullptr;  ///< One for each byte; null: byte i of `text` is byte `begin` + i of the given text.
  std::size_t begin = 0;            ///< Unused where there are origins.

  [[nodiscard]] Section part(std::size_t from, std::size_t to) const {
    return {text.substr(from, to - from), origins == nullptr ? nullptr : origins + from, begin + from};
  }
  /// @returns where the bytes [from, to), at least one, come from.
  [[nodiscard]] TextRange range(std::size_t from, std::size_t to) const {
    if (origins == nullptr) return {begin + from, begin + to};
    return {origins[from].begin, origins[to - 1].end};
  }
};

class AlignedText {
 public:
  explicit AlignedText(const Section& section);

  /// Puts `prefix` in front of a text that is not empty.
  void prepend(std::string_view prefix);
  /// Replaces every occurrence of `pattern` (not empty), from the left, without overlaps.
  void replace(std::string_view pattern, std::string_view content);
  /// Puts `content` with its origins, as many as it has bytes, in the place of all.
  void assign(std::string content, std::vector<Origin> origins);

  [[nodiscard]] Section section() const { return {text_, origins_.data(), 0}; }

 private:
  /// @throws ValueError where a change would make the text many times as long, or 1 GiB or more.
  void require_length(std::size_t length) const;

  std::string text_;
  std::vector<Origin> origins_;
  std::size_t given_;  ///< Bytes that the section had.
};

}  // namespace qlorapp
