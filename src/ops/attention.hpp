// SPDX-License-Identifier: Apache-2.0
/// Causal attention of packed rows with grouped heads, never holding a (T, T) matrix.
///
///     out[i, h] = Σ_j softmax_j(scale · q[i, h]·k[j, h / (H / H_kv)]) · v[j, h / (H / H_kv)],   j <= i in the row of i
///
/// With a window only the last `window` of these j count, i among them; 0: all.
///
/// q is (M, H, d); k and v are (M, H_kv, d), H a multiple of H_kv; one dtype. Row r holds tokens [row_starts[r], row_starts[r +
/// 1]); row_starts begins with 0 and ends with M, and rows never see each other. Views with strides (q, k, v of one packed
/// projection) are read in place if the elements of a head lie together.
/// Softmax and sums in float32 (float64 for float64). On the CPU: LibTorch's fused kernel a row; the backward of 16-bit inputs
/// is computed in float32 and rounded once, as dk and dv are after the sum over the heads that share them.
/// Source: Dao 2023, arXiv:2307.08691; Ainslie et al. 2023, arXiv:2305.13245 (grouped heads).
#pragma once

#include <tuple>

#include <ATen/core/Tensor.h>

namespace qlorapp::ops {

/// (out, lse): out contiguous (M, H, d); lse (H, M) float32 (float64 for float64), the natural log of the softmax's
/// denominator, which the backward pass needs. Differentiable in q, k, v.
/// @param deterministic  a GPU's fastest kernels add a gradient up in the order in which their blocks end; true takes those
/// that do not,
///        as torch.use_deterministic_algorithms(True) does. Both passes must be asked alike. The CPU has no others.
std::tuple<at::Tensor, at::Tensor> attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                             at::IntArrayRef row_starts, double scale, bool deterministic = false,
                                             int64_t window = 0);

/// (dq, dk, dv), contiguous, in the shapes of q, k, v.
std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                                                                  const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                                                                  at::IntArrayRef row_starts, double scale,
                                                                  bool deterministic = false, int64_t window = 0);

/// Generation: the queries of row r, [row_starts[r], row_starts[r + 1]) of q, are its LAST positions; theirs included it has
/// cache_lengths[r] keys. Key p is in slot cache_starts[r] + p of k and v, so that a row may keep spare capacity behind its keys. Of the first
/// shared_lengths[r], which other rows may have, too, it is slot shared_starts[r] + p; cache_starts[r] may then be below zero. Both empty: no
/// row shares keys. Returns out (M_q, H, d), contiguous. No gradient.
at::Tensor attention_with_cache(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, at::IntArrayRef row_starts,
                                at::IntArrayRef cache_starts, at::IntArrayRef cache_lengths, double scale, int64_t window = 0,
                                at::IntArrayRef shared_starts = {}, at::IntArrayRef shared_lengths = {});

/// attention_with_cache() of one query a row, in one launch: where its keys are is read on the device, so that the launch can be recorded.
/// @param cache_starts, cache_lengths, shared_starts, shared_lengths  int64 (R) on the device of q, the last two both or neither; lengths of at
/// least 1, shared lengths a multiple of 16.  @param longest  none is above it.
/// Softmax and sums in float32; probabilities are rounded to 16 bits on a GPU, as flash attention does.
at::Tensor decode_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& cache_starts,
                            const at::Tensor& cache_lengths, int64_t longest, double scale, int64_t window = 0,
                            const std::optional<at::Tensor>& shared_starts = {},
                            const std::optional<at::Tensor>& shared_lengths = {});
/// Whether the device has such a launch: a GPU, for 16 bits.
[[nodiscard]] bool has_decode_attention(at::Device device, at::ScalarType dtype, int64_t head_dim);

}  // namespace qlorapp::ops
