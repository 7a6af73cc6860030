// SPDX-License-Identifier: Apache-2.0
/// Keys and values of the tokens that generation has seen, for rows of different lengths.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "nn/block/decoder_block.hpp"
#include "nn/seating.hpp"

namespace qlorapp {

class CausalLM;
class DecodeSteps;

struct GenerationCache {
  std::vector<KeyValueCache> blocks;
  std::vector<int64_t> lengths;             ///< Positions per row so far.
  int64_t capacity = 0;                     ///< Slots per row, at most.
  std::vector<RowPlace> places = {};        ///< Of each row in each block's keys and values.
  bool adapters_are_constant = false;       ///< Their values do not change between two passes over this cache.
  std::shared_ptr<DecodeSteps> steps = {};  ///< Made by the first pass; a copy of the cache must have its own.

  // Of a cache whose rows have `capacity` slots each, and share none:
  /// Makes room for `wanted` positions per row. Copies what the rows hold if they have less; at least doubles the capacity then.
  void reserve(int64_t wanted);
  /// Row i becomes a copy of the row `rows[i]` (beam search reorders, several returned sequences repeat).
  /// @throws ValueError for a row that does not exist.
  void select_rows(std::span<const int64_t> rows);
  /// Forgets the last `count` positions of every row (assisted decoding takes back what was not accepted).
  /// @throws ValueError if a row has fewer.
  void remove_last(int64_t count);

  [[nodiscard]] const RowPlace& place(int64_t row) const { return places[static_cast<size_t>(row)]; }
  [[nodiscard]] int64_t row_count() const { return static_cast<int64_t>(lengths.size()); }

 private:
  friend GenerationCache make_cache(const CausalLM& model, int64_t rows, int64_t capacity);
  /// Rows of `capacity` slots, one behind the other.
  void place_rows();
};

/// Empty, with room for `rows` rows of at most `capacity` positions each, on the model's device.
[[nodiscard]] GenerationCache make_cache(const CausalLM& model, int64_t rows, int64_t capacity);
/// The same with `slots` in all, of which the caller gives each row some by GenerationCache::places.
[[nodiscard]] GenerationCache make_cache(const CausalLM& model, int64_t rows, int64_t capacity, int64_t slots);
/// Of the keys and values of one position.
[[nodiscard]] int64_t cache_bytes_per_position(const CausalLM& model);

/// Hidden states after the last norm of the last token of each row, (R, D), or of every token, (M, D). No gradients.
/// @param tokens  (M) int64 on the model's device: counts[0] tokens that follow those of cache row rows[0], then counts[1] of
///                rows[1] …
/// @throws ValueError if a row outgrows the capacity.
[[nodiscard]] at::Tensor forward_cached(CausalLM& model, const at::Tensor& tokens, std::span<const int64_t> rows,
                                        std::span<const int64_t> counts, GenerationCache& cache, bool every_token = false);

}  // namespace qlorapp
