// SPDX-License-Identifier: Apache-2.0
// A tensor as rows for kernels: (…, n) becomes (rows, n) with contiguous elements and any distance between rows.
#pragma once

#include <algorithm>
#include <string_view>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/reshape.h>

#include "simd.hpp"

#if AT_PARALLEL_OPENMP && !defined(INTRA_OP_PARALLEL)
#error "at::parallel_for would run on one thread here: compile with -fopenmp (cmake/QlorappTorch.cmake)"
#endif

namespace qlorapp::ops::cpu {

/// A view when the layout allows one, else a copy.
inline at::Tensor as_rows(const at::Tensor& x) {
  const at::Tensor rows = x.dim() == 2 ? x : x.reshape({-1, x.size(-1)});
  return rows.stride(1) == 1 || rows.size(1) == 1 ? rows : rows.contiguous();
}

/// For a tensor that the kernel writes: always a view.
inline at::Tensor as_written_rows(std::string_view op, std::string_view name, const at::Tensor& x) {
  const at::Tensor rows = as_rows(x);
  TORCH_CHECK_VALUE(rows.is_alias_of(x) && (rows.size(0) <= 1 || rows.stride(0) >= rows.size(1)), "[", op, "] ", name,
                    " must have contiguous rows at even distances, because it is written; got sizes ", x.sizes(),
                    " and strides ", x.strides(), ". Pass a contiguous tensor.");
  return rows;
}

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
