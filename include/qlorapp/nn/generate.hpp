// SPDX-License-Identifier: Apache-2.0
/// Greedy continuation of a prompt with a key-value cache.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "qlorapp/nn/causal_lm.hpp"

namespace qlorapp {

struct GenerateOptions {
  int64_t max_new_tokens = 128;        ///< >= 1.
  std::vector<int64_t> eos_token_ids;  ///< Any of them ends the text; it is returned as the last token.
  /// Called with each new token; returning false stops. May be empty.
  std::function<bool(int64_t token)> on_token;
};

/// @param prompt  token ids, at least one, all in the vocabulary.
/// @returns the new tokens: each the one with the largest logit, the lowest id of equals. Synchronizes once a token.
/// @throws ValueError naming the position of a token outside the vocabulary.
[[nodiscard]] std::vector<int64_t> generate(CausalLM& model, const std::vector<int64_t>& prompt, const GenerateOptions& options);

}  // namespace qlorapp
