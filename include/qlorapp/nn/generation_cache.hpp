// SPDX-License-Identifier: Apache-2.0
/// Keys and values of the tokens that generation has seen, for rows of different lengths.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "qlorapp/nn/decoder_block.hpp"

namespace qlorapp {

/// Row r occupies slots [r · capacity, r · capacity + lengths[r]) of each block's keys and values.
struct GenerationCache {
  std::vector<KeyValueCache> blocks;
  std::vector<int64_t> lengths;  ///< Positions per row so far.
  int64_t capacity = 0;          ///< Slots per row.

  /// Makes room for `wanted` positions per row. Copies what the rows hold if they have less; at least doubles the capacity then.
  void reserve(int64_t wanted);
  /// Row i becomes a copy of the row `rows[i]` (beam search reorders, several returned sequences repeat).
  /// @throws ValueError for a row that does not exist.
  void select_rows(std::span<const int64_t> rows);
  /// Forgets the last `count` positions of every row (assisted decoding takes back what was not accepted).
  /// @throws ValueError if a row has fewer.
  void remove_last(int64_t count);

  [[nodiscard]] int64_t row_count() const { return static_cast<int64_t>(lengths.size()); }
};

}  // namespace qlorapp
