// SPDX-License-Identifier: Apache-2.0
/// What operators take on a GPU beside their results: used by those that take it and, on Meta tensors, by the planner.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>

#include "ops/memory_tape.hpp"

namespace qlorapp::ops {

/// How the rows of a batch lie, empty ones left out.
struct RowLayout {
  std::vector<int64_t> starts;
  int64_t rows = 0, longest = 0;
  bool equal = true;

  explicit RowLayout(at::IntArrayRef row_starts) : starts{0} {
    for (const int64_t start : row_starts.slice(1)) {
      const int64_t length = start - starts.back();
      if (length == 0) continue;
      equal = equal && (rows == 0 || length == longest);
      longest = std::max(longest, length);
      starts.push_back(start);
      ++rows;
    }
  }
};

enum class AttentionKernel { kCudnn, kFlash, kEfficient };

/// The choice depends on shapes, dtype and GPU only, so that forward and backward agree.
/// @param architecture  75, 80, 90 …  @param deterministic  sums in one order, which cuDNN does not promise.
/// @param window  cuDNN's kernel has none; one that is as long as the rows is none.
inline AttentionKernel attention_kernel(const at::Tensor& q, const RowLayout& layout, int64_t architecture, bool deterministic,
                                        int64_t window) {
  const int64_t d = q.size(2), major = architecture / 10;
  if (q.scalar_type() == at::kFloat || major < 8 || d % 8 != 0 || d > 256) return AttentionKernel::kEfficient;
  // cuDNN builds a plan for every new shape, some 50 ms; short rows have many shapes and nothing to gain.
  constexpr int64_t kShortest = 256;
  const bool windowed = window > 0 && window < layout.longest;
  const bool cudnn =
      !deterministic && !windowed && (major == 9 || major == 10) && layout.equal && layout.longest >= kShortest && d <= 128;
  return cudnn ? AttentionKernel::kCudnn : AttentionKernel::kFlash;
}

/// Whether the caller or torch (torch.use_deterministic_algorithms(True)) asks for sums in one order.
inline bool is_deterministic(bool asked) {
  const at::Context& torch = at::globalContext();
  return asked || (torch.deterministicAlgorithms() && !torch.deterministicAlgorithmsWarnOnly());
}

/// The efficient kernel pads a row's statistic to a multiple of this.
constexpr int64_t kStatisticAlignment = 32;
constexpr int64_t statistic_stride(int64_t longest) {
  return (longest + kStatisticAlignment - 1) / kStatisticAlignment * kStatisticAlignment;
}

/// The tensors of linear_cross_entropy: its results, and what a chunk of rows needs.
struct CrossEntropyBuffers {
  at::Tensor index, labels;  ///< int64 (count) of the rows that have a target; undefined if all rows are computed.
  at::Tensor gradient;       ///< (M, D), or empty.
  at::Tensor losses, total;  ///< float32 (count) and ().
  at::Tensor logits;         ///< (chunk, V); its rows begin at multiples of 16 bytes.
  at::Tensor rows;           ///< (chunk, D) of hidden; undefined if all rows are computed.
  at::Tensor statistics;     ///< float32 (2, count), undefined if not asked for.
  int64_t chunk = 0;

  CrossEntropyBuffers(const at::Tensor& hidden, int64_t vocabulary, const at::TensorOptions& target_options, int64_t count,
                      int64_t chunk_rows, bool need_gradient, bool has_statistics = false)
      : chunk(std::min(chunk_rows, count)) {
    const bool everything = count == hidden.size(0);
    if (!everything) {
      index = at::empty({count}, target_options);
      labels = at::empty({count}, target_options);
    }
    gradient = !need_gradient ? at::empty({0}, hidden.options())
               : everything   ? at::empty_like(hidden, at::MemoryFormat::Contiguous)
                              : at::zeros_like(hidden, at::MemoryFormat::Contiguous);
    const MemoryUseScope use(MemoryUse::kLogits);
    losses = at::empty({count}, hidden.options().dtype(at::kFloat));
    total = at::empty({}, losses.options());
    if (has_statistics) statistics = at::empty({2, count}, losses.options());
    logits = at::empty({chunk, padded(vocabulary)}, hidden.options()).narrow(1, 0, vocabulary);
    if (!everything) rows = at::empty({chunk, hidden.size(1)}, hidden.options());
  }
  /// Elements from one row of logits to the next: rows of an odd vocabulary stay aligned.
  static constexpr int64_t padded(int64_t vocabulary) { return (vocabulary + 7) / 8 * 8; }
};

}  // namespace qlorapp::ops
