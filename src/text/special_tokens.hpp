// SPDX-License-Identifier: Apache-2.0
/// Which tokens begin, end and pad a text, from the files beside tokenizer.json. Torch-free.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "qlorapp/text/tokenizer.hpp"

namespace qlorapp {

struct SpecialTokens {
  std::optional<TokenId> bos, eos, pad;
  std::vector<TokenId> all_eos;
  bool split = false;  ///< split_special_tokens: a special token in a text is ordinary text.
};

/// tokenizer_config.json with the entries of special_tokens_map.json that count: as in transformers' AutoTokenizer they replace those
/// of tokenizer_config.json, unless that has "added_tokens_decoder". @throws FormatError for a file that is no JSON object.
struct TokenizerConfig {
  nlohmann::json values;
  std::string path;      ///< Of tokenizer_config.json …
  std::string map_path;  ///< … and of special_tokens_map.json; empty where that does not count.
  nlohmann::json map;

  /// @returns the file that the value of `key` is from.
  [[nodiscard]] const std::string& file_of(const char* key) const { return map.contains(key) ? map_path : path; }
};
[[nodiscard]] TokenizerConfig read_tokenizer_config(const std::string& folder);

/// The names of read_tokenizer_config() (a string, or an object with a content), then the ids of generation_config.json and
/// config.json. @throws FormatError for a name that the tokenizer does not know.
/// @param model_folder  where generation_config.json and config.json stand.
[[nodiscard]] SpecialTokens read_special_tokens(const std::string& folder, const std::string& model_folder,
                                                const Tokenizer& tokenizer);

}  // namespace qlorapp
