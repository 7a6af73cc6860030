// SPDX-License-Identifier: Apache-2.0
/// The Unigram model of SentencePiece (Helium): of all ways to divide a piece into tokens the one with the largest sum of scores. Torch-free.
///
/// Rules: Hugging Face tokenizers, models/unigram. Sums run in its order, in double precision, over the whole piece: a sum of parts would
/// round in another way.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "piece_model.hpp"

namespace qlorapp {

struct UnigramOptions {
  std::vector<double> scores;  ///< Of the tokens, in the order of their ids, which count from 0.
  std::optional<int32_t> unk_id = {};
  bool byte_fallback = false;  ///< Characters without a token become the tokens of their bytes, where all are there.
};

class UnigramModel : public PieceModel {
 public:
  /// @throws FormatError naming `where` for an unk_id that is none, and for a token that is empty or there twice.
  UnigramModel(const Vocabulary& vocabulary, UnigramOptions options, const std::string& where);

  /// O(n) in its bytes times the depth of the vocabulary.
  void encode(std::string_view piece, std::vector<PieceToken>& out) const override;
  [[nodiscard]] const StringMap<int32_t>& token_ids() const override { return token_ids_; }
  [[nodiscard]] bool may_cut_before(std::string_view) const override { return false; }

 private:
  /// Appends the token of a text, or those of its bytes, or the unknown one.
  void put(std::string_view text, std::vector<PieceToken>& out) const;

  UnigramOptions options_;
  StringMap<int32_t> token_ids_;
  std::array<int32_t, 256> fallback_{};              ///< The tokens "<0x00>" … "<0xFF>", or -1.
  std::unordered_map<uint64_t, uint32_t> children_;  ///< (node << 8 | byte) → node, of all tokens as a trie; 0 is the root.
  std::vector<int32_t> token_at_;                    ///< The token that ends at a node, or -1.
  double unknown_score_ = 0;
};

}  // namespace qlorapp
