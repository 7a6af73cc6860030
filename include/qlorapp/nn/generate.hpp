// SPDX-License-Identifier: Apache-2.0
/// Continuation of prompts with a key-value cache, greedily or by sampling. Rows go through the model together, without padding; one that
/// ends leaves, and the next prompt takes its place. What prompts begin with in common is computed and stored
/// once, in whole multiples of 16 tokens.
///
/// A row's random numbers depend on its number and position alone. Its greedy tokens are those of the row alone unless a rounding decides:
/// products and attention may add up in another order with another number of rows, so two tokens whose logits nearly equal may change places
/// (seldom in float32, now and then in 16 bits). With `deterministic` every row has the bits of the row alone.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "qlorapp/nn/causal_lm.hpp"
#include "qlorapp/nn/sampling.hpp"

namespace qlorapp {

struct GenerateOptions {
  int64_t max_new_tokens = 128;  ///< >= 1.
  /// A row has as many new tokens as the model's positions leave it, if that is fewer than max_new_tokens. Otherwise such a row is refused.
  bool fits_positions = false;
  int64_t min_new_tokens = 0;          ///< Before that many no eos token is chosen.
  std::vector<int64_t> eos_token_ids;  ///< Any of them ends the text; it is returned as the last token.
  SamplingOptions sampling;
  /// Called with each new token of each row; returning false ends that row. May be empty. What it throws ends the generation.
  std::function<bool(int64_t row, int64_t token)> on_token;
  /// Called with each row's new tokens when it has ended; rows end in any order. May be empty.
  std::function<void(int64_t row, std::span<const int64_t> tokens)> on_end;
  int64_t max_rows = 128;  ///< Rows that are computed at once, >= 1.
  /// Rows are computed one after the other, each from its first token in a cache of its own: nothing of a row depends on the others but
  /// the number in its random numbers' key. A batch then takes as long as its rows alone.
  bool deterministic = false;
  int64_t cache_bytes = 0;  ///< Of keys and values, at most; 0: the memory that is free on the model's device, less a tenth.
};

/// Positions that a row of this model may have: max_position_embeddings, or as many as its rotary scaling adds to them ("linear" and "yarn"
/// are for `factor` times as many). Without end where every rotation adapts to its row ("dynamic").
[[nodiscard]] int64_t position_limit(const format::ModelConfig& config);

/// The checks of generate(), except those of the tokens. They need no weights, so a caller can run them before it loads the model.
/// @throws ValueError naming the option that is out of range, or the prompt that leaves no position for a new token, or fewer than max_new_tokens
/// without fits_positions.
/// @param places  of the prompts, for messages; empty: they are prompts[N].
void check_generation(const format::ModelConfig& config, const std::vector<std::vector<int64_t>>& prompts,
                      const GenerateOptions& options, const std::vector<std::string>& places = {});

/// Tokens of each prompt whose keys and values generate() has once with those of an earlier one, if it enters while that one is there.
/// @param prompts, options  that check_generation() accepts.
[[nodiscard]] std::vector<int64_t> shared_tokens(const format::ModelConfig& config,
                                                 const std::vector<std::vector<int64_t>>& prompts, const GenerateOptions& options);

/// The most new tokens of a prompt of so many: max_new_tokens, or what the positions leave.
[[nodiscard]] int64_t new_tokens_of(const format::ModelConfig& config, int64_t prompt_tokens, const GenerateOptions& options);

/// @param prompts  token ids, at least one each, all in the vocabulary.
/// @returns the new tokens of each prompt. Synchronizes once a pass of one token a row.
/// @throws ValueError as check_generation(), or naming the place of a token outside the vocabulary, or the row whose keys and values are above cache_bytes.
[[nodiscard]] std::vector<std::vector<int64_t>> generate(CausalLM& model, const std::vector<std::vector<int64_t>>& prompts,
                                                         const GenerateOptions& options);
/// One prompt.
[[nodiscard]] std::vector<int64_t> generate(CausalLM& model, const std::vector<int64_t>& prompt, const GenerateOptions& options);

}  // namespace qlorapp
