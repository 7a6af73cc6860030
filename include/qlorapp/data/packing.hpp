// SPDX-License-Identifier: Apache-2.0
/// Short rows share a micro-batch's place: several become one pack of at most max_length tokens. Torch-free.
///
/// A pack is an Example whose row_lengths say where its rows lie. Rows of a pack never see each other: each counts its
/// positions from 0, attends to itself alone and predicts nothing across its end, on every device. So a pack's loss is the sum
/// of its rows' losses, and only the number of optimizer steps differs from training on the rows one by one.
///
///   bfd        longest row first, each into the pack where it leaves the least room (Fewer Truncations Improve Language
///              Modeling, arXiv:2404.10830); a row beyond max_length loses its end
///   bfd_split  the same, but a long row is cut into pieces of max_length, each a row of its own
///   wrapped    all rows one after the other, cut every max_length tokens wherever that falls
///
/// Names and cuts are those of TRL's pack_dataset. It packs a thousand rows at a time, this all of them; and its "wrapped" lets
/// the rows of a pack see each other, this does not (docs/adr/0012).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "qlorapp/data/dataset.hpp"

namespace qlorapp {

enum class PackingStrategy { kBestFitDecreasing, kBestFitDecreasingSplit, kWrapped };
/// @throws ValueError naming the known ones: "bfd", "bfd_split", "wrapped".
[[nodiscard]] PackingStrategy packing_strategy(std::string_view name);

/// Best-fit decreasing: which of `lengths` go together. The longest is placed first (of equals the earlier), into the fullest
/// pack that has room (of equals the oldest), else into a new one. O(n log n), the same packs for the same lengths.
/// @param lengths  each from 1 to capacity.
/// @returns the packs in the order that they were begun, each a list of indices into `lengths`.
[[nodiscard]] std::vector<std::vector<int64_t>> best_fit_decreasing(std::span<const int64_t> lengths, int64_t capacity);

struct Packed {
  std::vector<Example> examples;  ///< Each at most max_length tokens; `line` is that of its first row.
  int64_t rows = 0;               ///< Rows that went in, empty ones not counted.
  int64_t tokens = 0;             ///< In the packs.
  int64_t cut_tokens = 0;         ///< Lost at the ends of rows beyond max_length; bfd only.
  int64_t untrained_rows = 0;     ///< Rows, or pieces of rows, left out because no target is in them.

  /// "864 rows in 63 packs of at most 1024 tokens, 97.3 % full"
  [[nodiscard]] std::string line(int64_t max_length) const;
};

/// @param rows        not packed themselves.
/// @param max_length  tokens of a pack, at least 2.
/// @throws ValueError for a smaller max_length, a row that is a pack, or when nothing with a target remains.
[[nodiscard]] Packed pack(std::span<const Example> rows, int64_t max_length, PackingStrategy strategy);

}  // namespace qlorapp
