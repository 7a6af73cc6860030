// SPDX-License-Identifier: Apache-2.0
/// The byte-level BPE model: a piece of bytes becomes token ids by merging adjacent pairs, lowest rank first. Torch-free.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace qlorapp {

/// GPT-2's printable alphabet: token files spell each byte as one code point (space is U+0120 'Ġ').
/// @returns the bytes that `token` spells, or false where it has a code point outside the alphabet.
[[nodiscard]] bool bytes_of_token(std::string_view token, std::string& bytes);
/// The inverse of bytes_of_token.
[[nodiscard]] std::string token_of_bytes(std::string_view bytes);

/// Finds strings without making one.
struct StringHash {
  using is_transparent = void;
  std::size_t operator()(std::string_view text) const noexcept { return std::hash<std::string_view>{}(text); }
};
template <class Value>
using StringMap = std::unordered_map<std::string, Value, StringHash, std::equal_to<>>;

/// One token of a piece and how many of its bytes it covers.
struct PieceToken {
  int32_t id;
  uint32_t bytes;
};

class BytePairModel {
 public:
  using Vocabulary = std::vector<std::pair<std::string, int32_t>>;  ///< As spelt in the file.
  using Merges = std::vector<std::pair<std::string, std::string>>;  ///< In order of rank.

  /// @throws FormatError naming `where` for ids that are negative or double and merges of unknown tokens.
  BytePairModel(const Vocabulary& vocabulary, const Merges& merges, bool ignore_merges, const std::string& where);

  /// Appends the tokens of one piece. O(n log n) in its bytes; short pieces are remembered. Safe to call from several threads.
  /// @throws ValueError for a byte that the vocabulary has no token for.
  void encode(std::string_view piece, std::vector<PieceToken>& out) const;

  [[nodiscard]] int64_t size() const { return static_cast<int64_t>(token_count_); }
  [[nodiscard]] const StringMap<int32_t>& token_ids() const { return token_ids_; }

 private:
  struct Merge {
    uint32_t rank;
    int32_t id;
  };
  void merge(std::string_view piece, std::vector<PieceToken>& out) const;
  [[nodiscard]] const Merge* find_merge(int32_t left, int32_t right) const;

  StringMap<int32_t> token_ids_;  ///< As spelt in the file.
  StringMap<int32_t> byte_ids_;   ///< The tokens that spell bytes, as those bytes.
  std::array<int32_t, 256> single_{};
  std::unordered_map<uint64_t, Merge> merges_;
  std::size_t token_count_ = 0;
  bool ignore_merges_;

  mutable std::mutex mutex_;
  mutable StringMap<std::vector<PieceToken>> remembered_;
};

}  // namespace qlorapp
