// SPDX-License-Identifier: Apache-2.0
/// The loss over a held-out set, without gradients.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "qlorapp/data/dataset.hpp"
#include "qlorapp/nn/causal_lm.hpp"

namespace qlorapp {

struct EvalLoss {
  double mean_of_batches = 0;  ///< Mean over rows of the mean loss of the batch that a row was in: transformers' eval_loss.
  double token_weighted = 0;   ///< Mean over all target tokens: does not depend on the batch size.
  int64_t target_tokens = 0;
};

/// @param between_batches  called after each batch; may be empty.
/// @throws ValueError if there are no rows or no targets.
[[nodiscard]] EvalLoss evaluate_loss(CausalLM& model, const std::vector<Example>& rows, int64_t batch_size,
                                     const std::function<void()>& between_batches = {});

}  // namespace qlorapp
