// SPDX-License-Identifier: Apache-2.0
/// One true step of the worst case, to see whether a plan holds, that leaves everything as it was.
#pragma once

#include <cstdint>

#include "qlorapp/core/units.hpp"
#include "qlorapp/nn/causal_lm.hpp"

namespace qlorapp {

struct ProbeOptions {
  int64_t batch = 1;     ///< Rows, >= 1.
  int64_t length = 512;  ///< Tokens of every row, >= 2.
  bool optimizer_is_8bit = false;
  bool evaluates = true;  ///< Evaluate a batch of that size, too.
};

/// Forward, backward, the optimizer's moments and the norm, and a batch in evaluation, over rows of made-up tokens. No
/// parameter changes; gradients are zero afterwards.
/// @returns what a CPU's allocator handed out at most on top of what was there; nothing for a GPU, whose allocator keeps its
/// own record.
/// @throws ValueError if there are no adapters or a size is not positive; c10::OutOfMemoryError from a GPU that is too small.
Bytes probe_step(CausalLM& model, const ProbeOptions& options);

/// Forward, backward and the norm over a batch. No parameter changes; gradients are zero afterwards.
void probe_micro_batch(CausalLM& model, const Batch& batch);

}  // namespace qlorapp
