// SPDX-License-Identifier: Apache-2.0
/// Continuation of prompts with a key-value cache, greedily or by sampling. Rows go through the model together, without padding; one that
/// ends leaves, and the next prompt takes its place. What prompts begin with in common is computed once.
///
/// A row's random numbers depend on its number and position alone, and in float64 or float32 its greedy tokens are those of the row alone. In
/// 16 bits products and attention may add up in another order with another number of rows, which decides between two tokens whose logits
/// differ by a rounding.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
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
  /// Called with each row's new tokens when it has ended; rows end in any order. May be empty.
  std::function<void(int64_t row, std::span<const int64_t> tokens)> on_end;
  int64_t max_rows = 128;  ///< Rows that are computed at once, >= 1.
  int64_t cache_bytes =
      0;  ///< Of keys and values, at most; 0: what is free of a GPU, less a tenth; all that max_rows rows need of a CPU's.
};

/// @param prompts  token ids, at least one each, all in the vocabulary.
/// @returns the new tokens of each prompt. Synchronizes once a pass of one token a row.
/// @throws ValueError naming the position of a token outside the vocabulary, the option that is out of range, or the row whose keys and
/// values are above cache_bytes.
[[nodiscard]] std::vector<std::vector<int64_t>> generate(CausalLM& model, const std::vector<std::vector<int64_t>>& prompts,
                                                         const GenerateOptions& options);
/// One prompt.
[[nodiscard]] std::vector<int64_t> generate(CausalLM& model, const std::vector<int64_t>& prompt, const GenerateOptions& options);

}  // namespace qlorapp
