// SPDX-License-Identifier: Apache-2.0
/// The BPE model: a piece of text becomes token ids by merging adjacent pairs, lowest rank first. Torch-free.
///
/// Byte-level models begin with the bytes of a piece, the others (Llama 2, Mistral, Gemma) with its characters; one that the
/// vocabulary lacks becomes its bytes, "<0xE2>" …, or the unknown token. Rules: Hugging Face tokenizers, models/bpe.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "piece_model.hpp"

namespace qlorapp {

/// GPT-2's printable alphabet: token files spell each byte as one code point (space is U+0120 'Ġ').
/// @returns the bytes that `token` spells, or false where it has a code point outside the alphabet.
[[nodiscard]] bool bytes_of_token(std::string_view token, std::string& bytes);
/// The inverse of bytes_of_token.
[[nodiscard]] std::string token_of_bytes(std::string_view bytes);

using StringSet = std::unordered_set<std::string, StringHash, std::equal_to<>>;

struct BytePairOptions {
  bool byte_level = true;      ///< Tokens are spelled in GPT-2's alphabet; else they are their own text.
  bool byte_fallback = false;  ///< A character without a token becomes the tokens of its bytes, where all are there.
  bool fuse_unk = false;       ///< Unknown characters beside each other become one unknown token.
  bool ignore_merges = false;  ///< A piece that is a token becomes that token at once.
  std::optional<std::string> unk_token = {};
};

class BytePairModel : public PieceModel {
 public:
  using Merges = std::vector<std::pair<std::string, std::string>>;  ///< In order of rank.

  /// @throws FormatError naming `where` for ids that are negative or double, merges of unknown tokens, and an unknown token that
  ///         is none.
  BytePairModel(const Vocabulary& vocabulary, const Merges& merges, BytePairOptions options, const std::string& where);

  /// O(n log n) in its bytes; short pieces are remembered.
  void encode(std::string_view piece, std::vector<PieceToken>& out) const override;

  [[nodiscard]] const StringMap<int32_t>& token_ids() const override { return token_ids_; }

  /// True if no merge ever joins the two.
  [[nodiscard]] bool may_cut_before(std::string_view character) const override;

 private:
  struct Merge {
    uint32_t rank;
    int32_t id;
  };
  void read_merges(const Merges& merges, const std::string& where);
  /// Appends the tokens that merging begins with.
  void first_tokens(std::string_view piece, std::vector<PieceToken>& out) const;
  /// Appends the tokens of the bytes of a character; @returns false, and appends nothing, where one is not there.
  bool fall_back(std::string_view character, std::vector<PieceToken>& out) const;
  void merge(std::string_view piece, std::vector<PieceToken>& out) const;
  [[nodiscard]] const Merge* find_merge(int32_t left, int32_t right) const;
  /// @returns the id of the token that spells these bytes of text, or -1.
  [[nodiscard]] int32_t id_of(std::string_view text) const;

  BytePairOptions options_;
  StringMap<int32_t> token_ids_;         ///< As spelled in the file.
  StringMap<int32_t> byte_ids_;          ///< Byte-level: the tokens that spell bytes, as those bytes.
  std::array<int32_t, 256> single_{};    ///< The token of each byte that is a unit by itself, or -1.
  std::array<int32_t, 256> fallback_{};  ///< The tokens "<0x00>" … "<0xFF>", or -1.
  int32_t unk_ = -1;
  std::unordered_map<uint64_t, Merge> merges_;
  StringSet joined_;  ///< Characters that some merge joins to another character in front of them.

  mutable std::mutex mutex_;
  mutable StringMap<std::vector<PieceToken>> remembered_;
};

}  // namespace qlorapp
