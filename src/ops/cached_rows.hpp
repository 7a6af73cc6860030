// SPDX-License-Identifier: Apache-2.0
/// Where the keys and values of rows are that generation continues (ops::attention_with_cache).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>

namespace qlorapp::ops {

struct CachedRows {
  at::IntArrayRef starts, lengths, shared_starts, shared_lengths;  ///< As the operator takes them.

  /// Keys that row r may share with others: its first.
  [[nodiscard]] int64_t shared(size_t r) const { return shared_lengths.empty() ? 0 : shared_lengths[r]; }

  /// Slots one behind the other.
  struct Run {
    int64_t begin, count;
  };
  struct Runs {
    Run shared, own;
  };
  /// Those of row r's keys [first, last).
  [[nodiscard]] Runs runs(size_t r, int64_t first, int64_t last) const {
    const int64_t border = std::clamp(shared(r), first, last);
    return {{shared_lengths.empty() ? 0 : shared_starts[r] + first, border - first}, {starts[r] + border, last - border}};
  }

  /// The same of k or v: a view, or a copy where they lie in two places.
  [[nodiscard]] at::Tensor slots(const at::Tensor& cache, size_t r, int64_t first, int64_t last) const {
    const auto [common, own] = runs(r, first, last);
    if (common.count == 0) return cache.narrow(0, own.begin, own.count);
    const at::Tensor before = cache.narrow(0, common.begin, common.count);
    return own.count == 0 ? before : at::cat({before, cache.narrow(0, own.begin, own.count)});
  }
};

}  // namespace qlorapp::ops
