// SPDX-License-Identifier: Apache-2.0
/// Which tokens begin, end and pad a text, from the files beside tokenizer.json. Torch-free.
#pragma once

#include <optional>
#include <vector>

#include "qlorapp/data/tokenizer.hpp"

namespace qlorapp {

struct SpecialTokens {
  std::optional<TokenId> bos, eos, pad;
  std::vector<TokenId> all_eos;
};

/// tokenizer_config.json wins over special_tokens_map.json (a string, or an object with a content), that over the ids of
/// generation_config.json and config.json. @throws FormatError for a name that the tokenizer does not know.
[[nodiscard]] SpecialTokens read_special_tokens(const std::string& folder, const Tokenizer& tokenizer);

}  // namespace qlorapp
