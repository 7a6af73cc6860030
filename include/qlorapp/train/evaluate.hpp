// SPDX-License-Identifier: Apache-2.0
/// Loss and exact matches over a held-out set, without gradients.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "qlorapp/data/dataset.hpp"
#include "qlorapp/dist/communicator.hpp"
#include "qlorapp/nn/causal_lm.hpp"

namespace qlorapp {

struct EvalOptions {
  int64_t batch_size = 8;                  ///< Rows, >= 1.
  bool exact_match = false;                ///< Count the rows whose answer the model gives token by token.
  bool leave_out_nonfinite = false;        ///< Skips batches whose loss is NaN or infinite if another is finite; logs a warning.
  std::function<void()> after_each_batch;  ///< May be empty.
  Communicator* ranks = nullptr;  ///< Share the batches and get the same result, with no row counted twice; null: one process.
};

struct EvalResult {
  double mean_of_batches = 0;  ///< Mean over rows of the mean loss of the batch that a row was in: transformers' eval_loss.
  double token_weighted = 0;   ///< Mean over all target tokens: does not depend on the batch size.
  int64_t target_tokens = 0;
  /// With exact_match: rows that have an untrained prompt, and of these the ones whose every target is the token with the largest
  /// logit. Greedy generation from the prompt yields the whole answer for exactly those rows.
  int64_t prompted_rows = 0;
  int64_t exact_matches = 0;
};

/// @throws ValueError if there are no rows or no targets. Synchronizes once a batch.
[[nodiscard]] EvalResult evaluate(CausalLM& model, const std::vector<Example>& rows, const EvalOptions& options);

}  // namespace qlorapp
