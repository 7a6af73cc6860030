// SPDX-License-Identifier: Apache-2.0
/// How many rows are generated together, and the slots of keys and values that they take: one rule for generate() and for its plan
/// (memory/generation_plan.hpp).
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include <c10/core/ScalarType.h>

#include "core/check.hpp"
#include "qlorapp/core/units.hpp"
#include "qlorapp/format/model_config.hpp"

namespace qlorapp {

/// Tokens of prompts in one pass, unless one prompt has more.
inline constexpr int64_t kTokensAtOnce = 8192;

/// Keys and values of one position in all layers. Layers with a window have as many slots as the others.
[[nodiscard]] inline Bytes cache_per_position(const format::ModelConfig& config, at::ScalarType dtype) {
  return {2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim *
          static_cast<int64_t>(c10::elementSize(dtype))};
}

struct GenerationSize {
  int64_t rows = 0;     ///< That may be computed at once.
  int64_t longest = 0;  ///< Positions of the longest row.
  int64_t slots = 0;    ///< Positions that the cache holds.
};

/// @param longest  positions of the longest row, of its prompt and its new tokens.  @param slots  that each row takes, fewer where it shares
/// some. At least one row.
/// @param position  bytes of one.  @param most  bytes that all may take.
/// @throws ValueError if the longest row is above `most`.
[[nodiscard]] inline GenerationSize generation_size(int64_t longest, std::vector<int64_t> slots, int64_t max_new_tokens,
                                                    int64_t max_rows, Bytes position, Bytes most) {
  GenerationSize size{.rows = std::min(max_rows, std::ssize(slots)), .longest = longest, .slots = 0};
  std::ranges::sort(slots);
  const int64_t wanted = std::accumulate(slots.end() - size.rows, slots.end(), int64_t{0});
  size.slots = std::min(std::max(wanted, longest), most.count / position.count);
  QLORAPP_CHECK_VALUE(
      size.longest <= size.slots,
      "[generate] a row of {} positions, of its prompt and max_new_tokens ({}), takes {} of keys and values; {} may be used. "
      "Shorten the prompt, lower max_new_tokens, or give the cache more (cache_memory).",
      size.longest, max_new_tokens, to_string(position * size.longest), to_string(most));
  int64_t rows = 0;  // the shortest ones
  for (int64_t left = size.slots; rows < size.rows && slots[static_cast<size_t>(rows)] <= left; ++rows)
    left -= slots[static_cast<size_t>(rows)];
  size.rows = std::max<int64_t>(rows, 1);
  return size;
}

}  // namespace qlorapp
