// SPDX-License-Identifier: Apache-2.0
/// How the next token follows from the logits: transformers' processors and warpers, in transformers' order.
///
///   repetition_penalty p   a token that is in the row already: l/p where l > 0, l·p elsewhere (CTRL, arXiv:1909.05858)
///   min_new_tokens         no end of sequence before that many
///   and, where do_sample:
///   temperature t          l/t
///   top_k                  the k largest (and their equals); 0: all
///   top_p                  the smallest set whose probabilities reach top_p (arXiv:1904.09751), at least one token
///   min_p                  probabilities of at least min_p times the largest
///   the token              by inverse cumulative probability of one uniform number
///
/// The uniform number is a pure function of (seed, position, row) by Philox: the same on every device, and one row's text does
/// not depend on which other rows are generated beside it. With torch_draws the token is what torch.multinomial draws instead, which
/// transformers calls: torch.manual_seed gives the same tokens there and here.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

namespace qlorapp {

struct SamplingOptions {
  bool do_sample = false;           ///< false: the largest logit, of equals the lowest id.
  double temperature = 1.0;         ///< > 0
  int64_t top_k = 0;                ///< >= 0
  double top_p = 1.0;               ///< in [0, 1]
  double min_p = 0.0;               ///< in [0, 1]
  double repetition_penalty = 1.0;  ///< > 0; 1 changes nothing.
  uint64_t seed = 0;
  /// Numbers of torch's default generator of the device in place of `seed`: at each position of all rows, those that have ended included.
  bool torch_draws = false;

  /// @throws ValueError naming the option that is out of range.
  void validate() const;
};

/// Logits after repetition_penalty and the warpers; -inf for excluded tokens.
/// @param logits   (R, V), any float dtype. Not changed.
/// @param seen     (R, V) bool: the tokens that are in each row; read with repetition_penalty.
/// @param blocked  (R, V) bool, or (V), or undefined: tokens that must not be chosen now.
/// @returns (R, V) float32. Does not synchronize.
[[nodiscard]] at::Tensor warped_logits(const at::Tensor& logits, const at::Tensor& seen, const at::Tensor& blocked,
                                       const SamplingOptions& options);

/// @param logits     (R, V) as warped_logits returns them.
/// @param rows       of each row, its number: part of the key of its random numbers.
/// @param positions  of each row, its tokens generated so far, the other part.
/// @returns the chosen token of each row, (R) int64 on the device of the logits. Does not synchronize.
[[nodiscard]] at::Tensor choose_tokens(const at::Tensor& logits, std::span<const int64_t> rows, std::span<const int64_t> positions,
                                       const SamplingOptions& options);
/// The token that torch.multinomial draws with these numbers.
/// @param noise  (R, V) float32, exponentially distributed.
[[nodiscard]] at::Tensor choose_tokens(const at::Tensor& logits, const at::Tensor& noise);

}  // namespace qlorapp
