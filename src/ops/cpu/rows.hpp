// SPDX-License-Identifier: Apache-2.0
// The rows of a tensor (row_views.hpp), shared among threads.
#pragma once

#include <algorithm>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include "../row_views.hpp"
#include "simd.hpp"

#if AT_PARALLEL_OPENMP && !defined(INTRA_OP_PARALLEL)
#error "at::parallel_for would run on one thread here: compile with -fopenmp (cmake/QlorappTorch.cmake)"
#endif

namespace qlorapp::ops::cpu {

using ops::as_rows;
using ops::as_written_rows;

/// Elements below which another thread costs more than it brings.
inline constexpr int64_t kGrain = 32768;

/// f(row) for all rows, shared among the threads of at::parallel_for and vectorized for this CPU.
template <class F>
void for_rows(int64_t rows, int64_t elements_a_row, const F& f) {
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, elements_a_row));
  at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    simd::vectorized([&] {
      for (int64_t row = begin; row < end; ++row) f(row);
    });
  });
}

}  // namespace qlorapp::ops::cpu
