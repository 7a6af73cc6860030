// SPDX-License-Identifier: Apache-2.0
/// tokenizer.json as a checked description: what it may contain, and nothing else. Torch-free.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "added_tokens.hpp"
#include "byte_pair.hpp"
#include "pretokenize.hpp"

namespace qlorapp {

struct TokenizerDescription {
  BytePairModel::Vocabulary vocabulary;
  BytePairModel::Merges merges;
  bool ignore_merges = false;
  std::vector<AddedToken> added;
  std::vector<Split> splits;             ///< Applied one behind the other.
  bool add_prefix_space = false;         ///< A space is put before each stretch of text that does not start with one,
  std::size_t splits_before_prefix = 0;  ///< after this many of the splits.
  std::vector<int32_t> prefix_ids;       ///< What add_special_tokens puts before the text,
  std::vector<int32_t> suffix_ids;       ///< and behind it.
};

/// @throws FormatError naming `where` and the component that is malformed or not known here.
[[nodiscard]] TokenizerDescription read_tokenizer_json(std::string_view text, const std::string& where);

}  // namespace qlorapp
