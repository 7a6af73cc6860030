// SPDX-License-Identifier: Apache-2.0
/// Tokens beside the model, such as <|eot_id|>, that are cut out of the text before anything else looks at it. Torch-free.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace qlorapp {

struct AddedToken {
  int32_t id = 0;
  std::string content;
  bool special = false;      ///< Left out of decode(skip_special_tokens).
  bool lstrip = false;       ///< Takes the white space before it along.
  bool rstrip = false;       ///< Takes the white space behind it along.
  bool single_word = false;  ///< Not found beside a word character.
  bool normalized = false;   ///< Looked for in a second pass, in what the others have left.
};

/// A stretch of text: an added token, or text for the model (id -1). Byte offsets.
struct Stretch {
  std::size_t begin, end;
  int32_t id;
};

/// Leftmost-longest search for a set of tokens, in the manner of Hugging Face's AddedVocabulary.
class AddedTokenFinder {
 public:
  /// @param tokens  those of one pass; kept by value.
  explicit AddedTokenFinder(std::vector<AddedToken> tokens);

  /// Appends the stretches of text[begin, end), looked at as if it were the whole text. Stops behind the token that makes it `most`.
  /// @param splits_special  special tokens are text like any other.
  void find(std::string_view text, std::size_t begin, std::size_t end, bool splits_special, std::size_t most,
            std::vector<Stretch>& out) const;

 private:
  /// @returns the longest token that starts at the front of `text`, or nullptr.
  [[nodiscard]] const AddedToken* longest_at(std::string_view text) const;

  std::vector<AddedToken> tokens_;
  std::unordered_map<uint64_t, uint32_t> edges_;  ///< node << 8 | byte → node; node 0 is the root.
  std::vector<int32_t> token_at_;                 ///< Per node: index into tokens_, or -1.
  bool first_byte_[256] = {};
};

}  // namespace qlorapp
