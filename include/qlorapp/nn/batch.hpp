// SPDX-License-Identifier: Apache-2.0
/// The tokens of one micro-batch, rows laid end to end without padding. Knows no model.
#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace qlorapp {

/// Targets are already shifted: position i predicts `targets[i]`, which is the next token of the same row, or kIgnoredTarget
/// where nothing is to be learned (the last position of a row, a prompt, padding that came from outside).
struct Batch {
  static constexpr int64_t kIgnoredTarget = -100;

  at::Tensor tokens;                ///< (M) int64, M = sum of the row lengths.
  at::Tensor targets;               ///< (M) int64.
  at::Tensor positions;             ///< (M) int64, counted from 0 in each row (or from the cache's length when generating).
  std::vector<int64_t> row_starts;  ///< R + 1 entries: row r is [row_starts[r], row_starts[r + 1]). Rows never see each other.
  int64_t target_count = 0;         ///< Number of targets that are not ignored, known on the host: no synchronization later.
  int64_t first_label_count = 0;    ///< Rows whose first token carries a label; nothing predicts it, so it is no target.
  int64_t first_token = 0;          ///< For a part of a split micro-batch: tokens before it. Parts share one dropout mask.
  bool is_filler = false;           ///< Counts for nothing.

  [[nodiscard]] int64_t token_count() const { return row_starts.empty() ? 0 : row_starts.back(); }
  [[nodiscard]] int64_t row_count() const { return row_starts.empty() ? 0 : static_cast<int64_t>(row_starts.size()) - 1; }

  /// Whole rows of one length: each position's target is the next token of its row.
  /// @param tokens  (R, L) int64, R >= 1 and L >= 2; the batch's tensors are on its device.
  [[nodiscard]] static Batch of_equal_rows(const at::Tensor& tokens);

  /// One token without a target, on the CPU: what a rank computes that has fewer micro-batches than others, where all of them must ask
  /// for the same weights (nn/weight_stream.hpp). Its gradients are 0.
  [[nodiscard]] static Batch filler(int64_t token);

  /// @returns rows [first, last) of this batch, in its memory: a part of a micro-batch. On a GPU it synchronizes, to count targets.
  [[nodiscard]] Batch rows(int64_t first, int64_t last) const;

  /// @returns the same batch with its tensors on `device`. Synchronizes only as far as the copies do.
  [[nodiscard]] Batch to(at::Device device) const;
};

}  // namespace qlorapp
