// SPDX-License-Identifier: Apache-2.0
/// Continuation of prompts with a key-value cache, greedily or by sampling. Several prompts go through the model together,
/// without padding, and leave it one by one as they end.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "qlorapp/nn/causal_lm.hpp"
#include "qlorapp/nn/sampling.hpp"

namespace qlorapp {

struct GenerateOptions {
  int64_t max_new_tokens = 128;        ///< >= 1.
  int64_t min_new_tokens = 0;          ///< Before that many no eos token is chosen.
  std::vector<int64_t> eos_token_ids;  ///< Any of them ends the text; it is returned as the last token.
  SamplingOptions sampling;
  /// Called with each new token of each row; returning false ends that row. May be empty. What it throws ends the generation.
  std::function<bool(int64_t row, int64_t token)> on_token;
};

/// @param prompts  token ids, at least one each, all in the vocabulary.
/// @returns the new tokens of each prompt. Synchronizes once a position.
/// @throws ValueError naming the position of a token outside the vocabulary, or the option that is out of range.
[[nodiscard]] std::vector<std::vector<int64_t>> generate(CausalLM& model, const std::vector<std::vector<int64_t>>& prompts,
                                                         const GenerateOptions& options);
/// One prompt.
[[nodiscard]] std::vector<int64_t> generate(CausalLM& model, const std::vector<int64_t>& prompt, const GenerateOptions& options);

}  // namespace qlorapp
