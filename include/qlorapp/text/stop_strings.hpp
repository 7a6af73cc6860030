// SPDX-License-Identifier: Apache-2.0
/// Texts that end an answer, found across the boundaries of tokens. Torch-free.
///
/// A row ends with the token in whose text a stop string ends; the token may go on behind it. The string may begin in any earlier token, the
/// prompt's included. So do transformers' stop_strings (generation/stopping_criteria.py, StopStringCriteria). The string stays in the answer.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "qlorapp/text/tokenizer.hpp"

namespace qlorapp {

class StopStrings {
 public:
  /// The text of tokens, special ones included.
  using Decode = std::function<std::string(std::span<const TokenId>)>;

  /// @throws ValueError for an empty string.
  StopStrings(std::vector<std::string> strings, Decode decode);

  /// @returns false if there is no string to look for.
  [[nodiscard]] bool any() const { return !strings_.empty(); }
  /// A row begins behind the tokens of its prompt.
  void begin(int64_t row, std::span<const TokenId> prompt);
  /// One more token of a row. @returns whether the row ends with it.
  [[nodiscard]] bool add(int64_t row, TokenId token);
  /// Whether a string ended the row.
  [[nodiscard]] bool ended(int64_t row) const;
  /// "stop string '###' never matched in 3 answers", a line for each of which that is true of all rows begun.
  [[nodiscard]] std::vector<std::string> unmatched() const;

 private:
  struct Row {
    std::vector<TokenId> tail;  ///< Its last tokens.
    bool ended = false;
  };

  std::vector<std::string> strings_;
  std::vector<bool> matched_;
  Decode decode_;
  size_t window_ = 0;  ///< Tokens of which the longest string cannot be longer.
  std::map<int64_t, Row> rows_;
};

}  // namespace qlorapp
