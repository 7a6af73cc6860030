// SPDX-License-Identifier: Apache-2.0
/// What kernels of the planned device take beside their results, taken on Meta while a MemoryTape records; nothing otherwise.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include "ops/memory_tape.hpp"

namespace qlorapp::ops::meta {

/// Held until the operator returns.
using Scratch = std::vector<at::Tensor>;

/// @param q  (M, H, d).  @param k  (M, H_kv, d).
[[nodiscard]] Scratch attention_scratch(const at::Tensor& q, const at::Tensor& k, at::IntArrayRef row_starts, bool deterministic,
                                        int64_t window);
[[nodiscard]] Scratch cached_attention_scratch(const at::Tensor& q, at::IntArrayRef row_starts, at::IntArrayRef cache_lengths,
                                               int64_t window);
[[nodiscard]] Scratch attention_backward_scratch(const at::Tensor& q, const at::Tensor& k, at::IntArrayRef row_starts,
                                                 bool deterministic, int64_t window);

/// @param x  (tokens, in), @param weight  of `rows` × `columns` elements.
[[nodiscard]] Scratch linear_4bit_scratch(const at::Tensor& y, const at::Tensor& x, int64_t rows, int64_t columns, bool accumulate);

/// (total, gradient) of linear_cross_entropy, after everything that the device takes for it.
[[nodiscard]] std::tuple<at::Tensor, at::Tensor> linear_cross_entropy_planned(const at::Tensor& hidden, const at::Tensor& weight,
                                                                              const at::Tensor& targets, bool need_gradient,
                                                                              int64_t chunk_rows, int64_t target_count);

}  // namespace qlorapp::ops::meta
