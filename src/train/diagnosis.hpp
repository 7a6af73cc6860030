// SPDX-License-Identifier: Apache-2.0
/// Where a forward pass stops being finite.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "qlorapp/nn/batch.hpp"
#include "qlorapp/nn/causal_lm.hpp"

namespace qlorapp {

/// Runs the forward pass of each batch block by block, without gradients. Synchronizes after each block.
/// @returns one sentence: "Block 3 of 16 is the first whose output is not finite (its input reaches 51200; float16 ends at 65504)."
[[nodiscard]] std::string first_non_finite(CausalLM& model, std::span<const Batch> batches, uint64_t seed, uint32_t micro_step);

}  // namespace qlorapp
