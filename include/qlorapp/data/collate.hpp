// SPDX-License-Identifier: Apache-2.0
/// Rows to a Batch, and Hugging Face's padded tensors to a Batch and back.
///
/// A Batch has no padding: rows lie end to end, each counts its positions from 0, and targets are shifted inside their row.
/// The rows of a pack (data/packing.hpp) are rows of the batch like any other.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include <ATen/core/Tensor.h>

#include "qlorapp/data/dataset.hpp"
#include "qlorapp/nn/batch.hpp"

namespace qlorapp {

/// @param rows  indices into `examples`, in the order that the batch is to have.
/// @returns a batch on the CPU. @throws ValueError for no rows, an index outside, an empty row, labels or row_lengths of another length.
[[nodiscard]] Batch collate(std::span<const Example> examples, std::span<const int64_t> rows);
/// All of `examples`, in their order.
[[nodiscard]] Batch collate(std::span<const Example> examples);

/// A padded batch without its padding.
struct UnpaddedBatch {
  Batch batch;
  at::Tensor indices;                  ///< (M) int64: where token m stood in the flattened (B · T) grid.
  int64_t rows = 0, columns = 0;       ///< B and T.
  int64_t ignored_padding_labels = 0;  ///< Labels other than -100 that stood on padding; they are no targets here.
  int64_t ignored_first_labels =
      0;  ///< The same on first tokens of rows that do not begin in the first column: behind left padding, or packed.

  /// Scatters one value or row per token back: values (M, …) → (B, T, …), `fill` on the padding.
  [[nodiscard]] at::Tensor pad(const at::Tensor& values, double fill = 0.0) const;
};

/// @param input_ids       (B, T) integers.
/// @param attention_mask  (B, T), 1 for tokens and 0 for padding on the left or on the right; undefined: all tokens.
/// @param labels          (B, T) integers with -100 where nothing is to be learned, not shifted; undefined: no targets. A label right
///                        behind a row's last token, where no other of the row stands on padding, makes the token there one of the row: an EOS
///                        that is the padding, too, and was masked with it.
/// @returns the batch on input_ids' device. Synchronizes, because row lengths are needed on the host.
/// @param vocab_size      where it is given, tokens and labels must be below; padding may be anything.
/// @param position_ids    (B, T) or (1, T) integers; undefined: counted per row. Without a mask, a position that does not follow the one
///                        before it begins a packed row (transformers' rule for packed sequences). Rows are counted from 0 whatever they
///                        begin at: rotary embeddings depend on differences alone.
/// @throws ValueError for a mask with holes, a row without tokens, or positions with gaps beside a mask; TypeError for other dtypes;
///         c10::IndexError (Python's IndexError) for a token or label outside the vocabulary.
[[nodiscard]] UnpaddedBatch unpad(const at::Tensor& input_ids, const at::Tensor& attention_mask = {}, const at::Tensor& labels = {},
                                  int64_t vocab_size = 0, const at::Tensor& position_ids = {});

}  // namespace qlorapp
