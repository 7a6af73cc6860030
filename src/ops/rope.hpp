// SPDX-License-Identifier: Apache-2.0
/// Rotary position embedding, as transformers' apply_rotary_pos_emb.
///
///     y1 = round(round(x1·c) − round(x2·s)),   y2 = round(round(x2·c) + round(x1·s))
///
/// x is (M, H, head_dim). The first `width` elements of a head turn, the others stay. x1 and x2 are their halves, or with `interleaved`
/// neighbors; c and s are row positions[m] of cos and sin, rounded to x's dtype.
/// cos and sin: float32 (positions, width / 2), any attention scaling multiplied in (float64 x: converted, not recomputed).
/// positions: int64 (M). `inverse` negates s, which is the transposed map: what the backward pass applies to dy.
/// Source: Su et al. 2021, arXiv:2104.09864 §3.4; halves instead of pairs as in Hugging Face's checkpoints.
///
/// Throws ValueError, naming the token, for a position outside the tables (CPU; on a GPU that would synchronize, and the
/// caller guarantees it).
#pragma once

#include <ATen/core/Tensor.h>

#include "ops/norm.hpp"

namespace qlorapp::ops {

/// A contiguous tensor. Differentiable in x. x may be strided; elements of a head together, else it is copied.
at::Tensor rope(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& positions,
                bool inverse = false, bool interleaved = false);

/// In place, outside autograd. x may be a view: q and k of a packed (M, (H + 2·H_kv)·d) projection are turned by one call on
/// qkv.view({M, H + 2·H_kv, d}).narrow(1, 0, H + H_kv).
void rope_(at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& positions, bool inverse = false,
           bool interleaved = false);

/// What follows attention's backward pass, in one: dqkv = [dq | dk | dv] with dq and dk (M, H, d), (M, H_kv, d) turned back.
/// dqkv: (M, (H + 2·H_kv)·d), overwritten; its rows may lie any distance apart. Outside autograd.
void rope_backward_qkv_(at::Tensor& dqkv, const at::Tensor& dq, const at::Tensor& dk, const at::Tensor& dv, const at::Tensor& cos,
                        const at::Tensor& sin, const at::Tensor& positions, bool interleaved = false);

/// Heads that are normalized before they turn (Qwen3, Gemma 3): rope(rms_norm(head)), each with the rounding points of its own. The whole
/// head turns, by its halves.
/// @param x  (M, H, d), may be strided.  @param q_weight, k_weight  (d) of the first q_heads heads, and of the others.
/// @returns (M, H, d), contiguous. Differentiable in x.
at::Tensor rms_norm_rope(const at::Tensor& x, const at::Tensor& q_weight, const at::Tensor& k_weight, int64_t q_heads, double eps,
                         const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& positions,
                         NormRule rule = NormRule::kRoundTwice);

/// rope_backward_qkv_ and the norms' backward pass behind it, which forms their statistic again. Outside autograd.
/// @param x  (M, H + H_kv, d), what rms_norm_rope was given.
void rms_norm_rope_backward_qkv_(at::Tensor& dqkv, const at::Tensor& dq, const at::Tensor& dk, const at::Tensor& dv,
                                 const at::Tensor& x, const at::Tensor& q_weight, const at::Tensor& k_weight, double eps,
                                 const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& positions,
                                 NormRule rule = NormRule::kRoundTwice);

}  // namespace qlorapp::ops
