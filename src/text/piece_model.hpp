// SPDX-License-Identifier: Apache-2.0
/// What makes token ids of a piece of text. Torch-free.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace qlorapp {

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
  uint32_t bytes;  ///< 0: it stands for the same bytes as the token before it.
};

using Vocabulary = std::vector<std::pair<std::string, int32_t>>;  ///< As spelled in the file.

class PieceModel {
 public:
  PieceModel() = default;
  PieceModel(const PieceModel&) = delete;
  PieceModel& operator=(const PieceModel&) = delete;
  virtual ~PieceModel() = default;

  /// Appends the tokens of one piece. Safe to call from several threads.
  /// @throws ValueError for a byte or character that has no token where there is no unknown token either.
  virtual void encode(std::string_view piece, std::vector<PieceToken>& out) const = 0;

  [[nodiscard]] virtual const StringMap<int32_t>& token_ids() const = 0;

  /// @returns whether text may be cut in front of each `character` that follows another one without a change of its tokens. Models that see
  ///          a whole text as one piece (Llama 2) become fast by it.
  [[nodiscard]] virtual bool may_cut_before(std::string_view character) const = 0;
};

}  // namespace qlorapp
