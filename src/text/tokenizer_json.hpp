// SPDX-License-Identifier: Apache-2.0
/// tokenizer.json as a checked description: what it may contain, and nothing else. Torch-free.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "added_tokens.hpp"
#include "byte_pair.hpp"
#include "component_reader.hpp"
#include "unigram.hpp"

namespace qlorapp {

struct TokenizerDescription {
  Vocabulary vocabulary;
  BytePairModel::Merges merges;
  BytePairOptions model;
  std::optional<UnigramOptions> unigram;  ///< In place of merges and the options above.
  std::vector<AddedToken> added;
  Normalizer normalizer;
  PreTokenizer pre_tokenizer;
  DecoderDescription decoder;
  std::vector<int32_t> prefix_ids;  ///< What add_special_tokens puts before the text,
  std::vector<int32_t> suffix_ids;  ///< and behind it.
};

/// @throws FormatError naming `where` and the component that is malformed or not known here.
[[nodiscard]] TokenizerDescription read_tokenizer_json(std::string_view text, const std::string& where);

}  // namespace qlorapp
