// SPDX-License-Identifier: Apache-2.0
// Checks of the layer operators' arguments, written once for CPU, CUDA and Meta. Symbolic sizes pass, so that the operators
// can be traced. Kernels behind these checks trust their arguments.
#pragma once

#include <optional>
#include <string_view>

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include "ops/cached_rows.hpp"
#include "ops/logit_rule.hpp"
#include "qlorapp/format/family.hpp"

namespace qlorapp::ops {

using format::Activation;
using format::NormRule;

/// float32, bfloat16, float16, and float64 for gradcheck.
inline void check_floating(std::string_view op, std::string_view name, const at::Tensor& x) {
  const auto dtype = x.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf || dtype == at::kDouble, "[", op, "] ", name,
                   " must be float32, bfloat16, float16 or float64; got ", dtype, ". Convert it.");
}

inline void check_alike(std::string_view op, std::string_view name, const at::Tensor& x, std::string_view like_name,
                        const at::Tensor& like) {
  TORCH_CHECK_TYPE(x.scalar_type() == like.scalar_type(), "[", op, "] ", name, " must have the dtype of ", like_name, ", ",
                   like.scalar_type(), "; got ", x.scalar_type(), ". Convert it.");
  TORCH_CHECK_VALUE(x.device() == like.device(), "[", op, "] ", name, " must be on the device of ", like_name, ", ", like.device(),
                    "; got ", x.device(), ". Move it.");
}

inline void check_same_shape(std::string_view op, std::string_view name, const at::Tensor& x, std::string_view like_name,
                             const at::Tensor& like) {
  check_alike(op, name, x, like_name, like);
  TORCH_CHECK_VALUE(x.sym_sizes() == like.sym_sizes(), "[", op, "] ", name, " must have the shape of ", like_name, ", ",
                    like.sym_sizes(), "; got ", x.sym_sizes(), ". Pass tensors of the same tokens.");
}

inline at::ScalarType accumulate_type(const at::Tensor& x) { return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

inline void check_rms_norm(std::string_view op, const at::Tensor& x, const at::Tensor& weight) {
  check_floating(op, "x", x);
  check_alike(op, "weight", weight, "x", x);
  TORCH_CHECK_VALUE(x.dim() >= 1 && x.sym_size(-1) > 0 && weight.dim() == 1 && weight.sym_size(0) == x.sym_size(-1), "[", op,
                    "] x must be (…, D) and weight (D) with D > 0; got ", x.sym_sizes(), " and ", weight.sym_sizes(),
                    ". Pass the norm of this width.");
}

/// What rms_norm returned beside y, or will write.
inline void check_rstd(std::string_view op, const at::Tensor& x, const at::Tensor& rstd) {
  TORCH_CHECK_VALUE(
      rstd.scalar_type() == accumulate_type(x) && rstd.sym_sizes() == x.sym_sizes().slice(0, x.sym_sizes().size() - 1), "[", op,
      "] rstd must be what rms_norm returned for x; got ", rstd.scalar_type(), " ", rstd.sym_sizes(), " for x ", x.sym_sizes(),
      ". Save it in the forward pass.");
}

/// Of the variants that write into y and rstd.
inline void check_rms_norm_out(std::string_view op, const at::Tensor& x, const at::Tensor& y, const at::Tensor& rstd) {
  check_same_shape(op, "y", y, "x", x);
  check_rstd(op, x, rstd);
  TORCH_CHECK_VALUE(rstd.is_contiguous(), "[", op, "] rstd must be contiguous, because it is written; got strides ",
                    rstd.sym_strides(), ". Pass a new tensor.");
}

inline void check_rms_norm_backward(std::string_view op, const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight,
                                    const at::Tensor& rstd) {
  check_rms_norm(op, x, weight);
  check_same_shape(op, "dy", dy, "x", x);
  check_rstd(op, x, rstd);
}

inline void check_rope(std::string_view op, const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                       const at::Tensor& positions) {
  check_floating(op, "x", x);
  TORCH_CHECK_VALUE(x.dim() == 3 && x.sym_size(2) % 2 == 0, "[", op, "] x must be (M, H, head_dim) with an even head_dim; got ",
                    x.sym_sizes(), ". Split the heads first.");
  TORCH_CHECK_TYPE(cos.scalar_type() == at::kFloat && sin.scalar_type() == at::kFloat && positions.scalar_type() == at::kLong, "[",
                   op, "] cos and sin must be float32 and positions int64; got ", cos.scalar_type(), ", ", sin.scalar_type(), ", ",
                   positions.scalar_type(), ". Convert them.");
  TORCH_CHECK_VALUE(cos.dim() == 2 && sin.sym_sizes() == cos.sym_sizes() && cos.sym_size(1) * 2 <= x.sym_size(2), "[", op,
                    "] cos and sin must be (positions, head_dim / 2), or narrower; got ", cos.sym_sizes(), " and ", sin.sym_sizes(),
                    " for x ", x.sym_sizes(), ". Build the tables for this head_dim.");
  TORCH_CHECK_VALUE(positions.dim() == 1 && positions.sym_size(0) == x.sym_size(0), "[", op, "] positions must be (M); got ",
                    positions.sym_sizes(), " for x ", x.sym_sizes(), ". Pass one position a token.");
}

/// dqkv (M, (H + 2·H_kv)·d) becomes the gradients of q, k and v side by side.
inline void check_rope_backward_qkv(std::string_view op, const at::Tensor& dqkv, const at::Tensor& dq, const at::Tensor& dk,
                                    const at::Tensor& dv, const at::Tensor& cos, const at::Tensor& sin,
                                    const at::Tensor& positions) {
  check_rope(op, dq, cos, sin, positions);
  check_alike(op, "dk", dk, "dq", dq);
  check_same_shape(op, "dv", dv, "dk", dk);
  check_alike(op, "dqkv", dqkv, "dq", dq);
  TORCH_CHECK_VALUE(dk.dim() == 3 && dk.sym_size(0) == dq.sym_size(0) && dk.sym_size(2) == dq.sym_size(2), "[", op,
                    "] dq must be (M, H, d), dk and dv (M, H_kv, d); got ", dq.sym_sizes(), " and ", dk.sym_sizes(),
                    ". Pass what attention_backward returned.");
  const auto width = (dq.sym_size(1) + 2 * dk.sym_size(1)) * dq.sym_size(2);
  TORCH_CHECK_VALUE(dqkv.dim() == 2 && dqkv.sym_size(0) == dq.sym_size(0) && dqkv.sym_size(1) == width, "[", op, "] dqkv must be (",
                    dq.sym_size(0), ", ", width, "), rows any distance apart; got ", dqkv.sym_sizes(),
                    ". Pass the columns of the packed projection.");
}

inline void check_whole_heads(std::string_view op, const at::Tensor& x, const at::Tensor& cos) {
  TORCH_CHECK_VALUE(cos.sym_size(1) * 2 == x.sym_size(2), "[", op, "] cos and sin must be (positions, head_dim / 2); got ",
                    cos.sym_sizes(), " for x ", x.sym_sizes(), ". Norm and turn heads apart where a part of each turns.");
}

inline NormRule norm_rule(int64_t number) {
  TORCH_CHECK_VALUE(number >= 0 && number <= static_cast<int64_t>(NormRule::kOnePlus), "[rms_norm] rule must be 0, 1 or 2; got ",
                    number, ". 0 is Llama's.");
  return static_cast<NormRule>(number);
}

inline Activation activation(int64_t number) {
  TORCH_CHECK_VALUE(number == 0 || number == 1, "[gated_activation] act must be 0 (silu) or 1 (GELU with tanh); got ", number,
                    ". 0 is Llama's.");
  return static_cast<Activation>(number);
}

inline LogitRule logit_rule(double factor, double cap) {
  TORCH_CHECK_VALUE(factor > 0 && cap >= 0, "[linear_cross_entropy] logit_factor must be above 0 and logit_cap at least 0; got ",
                    factor, " and ", cap, ". 1 and 0 leave logits as they are.");
  return {factor, cap};
}

inline void check_rms_norm_rope(std::string_view op, const at::Tensor& x, const at::Tensor& q_weight, const at::Tensor& k_weight,
                                int64_t q_heads, const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& positions) {
  check_rope(op, x, cos, sin, positions);
  check_whole_heads(op, x, cos);
  for (const at::Tensor* weight : {&q_weight, &k_weight}) check_rms_norm(op, x, *weight);
  TORCH_CHECK_VALUE(q_heads >= 0 && x.sym_size(1) >= q_heads, "[", op, "] q_heads must be from 0 to the number of heads, ",
                    x.sym_size(1), "; got ", q_heads, ". Pass how many heads q_weight is for.");
}

inline void check_rms_norm_rope_backward(std::string_view op, const at::Tensor& dqkv, const at::Tensor& dq, const at::Tensor& dk,
                                         const at::Tensor& dv, const at::Tensor& x, const at::Tensor& q_weight,
                                         const at::Tensor& k_weight, const at::Tensor& cos, const at::Tensor& sin,
                                         const at::Tensor& positions) {
  check_rope_backward_qkv(op, dqkv, dq, dk, dv, cos, sin, positions);
  check_whole_heads(op, dq, cos);
  check_alike(op, "x", x, "dq", dq);
  TORCH_CHECK_VALUE(x.dim() == 3 && x.sym_size(0) == dq.sym_size(0) && x.sym_size(1) == dq.sym_size(1) + dk.sym_size(1) &&
                        x.sym_size(2) == dq.sym_size(2),
                    "[", op, "] x must be (M, H + H_kv, d), what rms_norm_rope was given; got ", x.sym_sizes(), " for dq ",
                    dq.sym_sizes(), " and dk ", dk.sym_sizes(), ". Keep the projection as it was.");
  for (const at::Tensor* weight : {&q_weight, &k_weight}) check_rms_norm(op, x, *weight);
}

inline void check_gated_activation(std::string_view op, const at::Tensor& gate_up) {
  check_floating(op, "gate_up", gate_up);
  TORCH_CHECK_VALUE(gate_up.dim() >= 1 && gate_up.sym_size(-1) > 0 && gate_up.sym_size(-1) % 2 == 0, "[", op,
                    "] gate_up must be (…, 2·I), gate first; got ", gate_up.sym_sizes(), ". Concatenate gate and up.");
}

inline void check_gated_activation_out(std::string_view op, const at::Tensor& gate_up, const at::Tensor& h) {
  check_gated_activation(op, gate_up);
  check_alike(op, "h", h, "gate_up", gate_up);
  auto want = gate_up.sym_sizes().vec();
  want.back() = want.back() / 2;
  TORCH_CHECK_VALUE(h.sym_sizes() == c10::SymIntArrayRef(want), "[", op, "] h must be ", c10::SymIntArrayRef(want), "; got ",
                    h.sym_sizes(), ". Pass half the width of gate_up.");
}

inline void check_gated_activation_backward(std::string_view op, const at::Tensor& dh, const at::Tensor& gate_up) {
  check_gated_activation(op, gate_up);
  check_alike(op, "dh", dh, "gate_up", gate_up);
  const auto leading = gate_up.sym_sizes().slice(0, gate_up.sym_sizes().size() - 1);
  TORCH_CHECK_VALUE(dh.dim() == gate_up.dim() && dh.sym_sizes().slice(0, leading.size()) == leading &&
                        dh.sym_size(-1) * 2 == gate_up.sym_size(-1),
                    "[", op, "] dh must be (…, I) for gate_up (…, 2·I); got ", dh.sym_sizes(), " and ", gate_up.sym_sizes(),
                    ". Pass the gradient of gated_activation's output.");
}

/// q (M_q, H, d); k and v (M_k, H_kv, d); H a multiple of H_kv.
inline void check_heads(std::string_view op, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  check_floating(op, "q", q);
  check_alike(op, "k", k, "q", q);
  check_same_shape(op, "v", v, "k", k);
  TORCH_CHECK_VALUE(q.dim() == 3 && k.dim() == 3 && q.sym_size(2) == k.sym_size(2) && q.sym_size(2) > 0 && k.sym_size(1) > 0 &&
                        q.sym_size(1) > 0 && q.sym_size(1) % k.sym_size(1) == 0,
                    "[", op, "] q must be (M, H, d), k and v (M, H_kv, d) with H a multiple of H_kv; got ", q.sym_sizes(), " and ",
                    k.sym_sizes(), ". Split the heads first; do not repeat k and v.");
}

inline void check_row_starts(std::string_view op, std::string_view name, at::IntArrayRef starts, const c10::SymInt& tokens) {
  bool rising = !starts.empty() && starts.front() == 0;
  for (size_t r = 1; r < starts.size(); ++r) rising = rising && starts[r] >= starts[r - 1];
  TORCH_CHECK_VALUE(rising && tokens == starts.back(), "[", op, "] ", name, " must rise from 0 to the number of tokens, ", tokens,
                    "; got ", starts, ". Pass the boundaries of the rows of this batch.");
}

inline void check_attention(std::string_view op, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            at::IntArrayRef row_starts) {
  check_heads(op, q, k, v);
  TORCH_CHECK_VALUE(q.sym_size(0) == k.sym_size(0), "[", op, "] q and k must have the same tokens; got ", q.sym_sizes(), " and ",
                    k.sym_sizes(), ". For queries against a longer cache use attention_with_cache.");
  check_row_starts(op, "row_starts", row_starts, q.sym_size(0));
}

inline void check_attention_backward(std::string_view op, const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                                     const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                                     at::IntArrayRef row_starts) {
  check_attention(op, q, k, v, row_starts);
  check_same_shape(op, "dout", dout, "q", q);
  check_same_shape(op, "out", out, "q", q);
  TORCH_CHECK_VALUE(lse.scalar_type() == accumulate_type(q) && lse.dim() == 2 && lse.sym_size(0) == q.sym_size(1) &&
                        lse.sym_size(1) == q.sym_size(0),
                    "[", op, "] lse must be the (H, M) that attention returned; got ", lse.scalar_type(), " ", lse.sym_sizes(),
                    ". Save it in the forward pass.");
}

inline void check_attention_with_cache(std::string_view op, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                       at::IntArrayRef row_starts, const CachedRows& rows) {
  const auto& [cache_starts, cache_lengths, shared_starts, shared_lengths] = rows;
  check_heads(op, q, k, v);
  check_row_starts(op, "row_starts", row_starts, q.sym_size(0));
  TORCH_CHECK_VALUE(cache_starts.size() + 1 == row_starts.size() && cache_lengths.size() == cache_starts.size(), "[", op,
                    "] cache_starts and cache_lengths must have one entry a row; got ", cache_starts, " and ", cache_lengths,
                    " for ", row_starts.size() - 1, " rows. Pass where each row's keys begin and how many there are.");
  TORCH_CHECK_VALUE(
      shared_starts.size() == shared_lengths.size() && (shared_starts.empty() || shared_starts.size() == cache_starts.size()), "[",
      op, "] shared_starts and shared_lengths must be empty or have one entry a row; got ", shared_starts, " and ", shared_lengths,
      " for ", cache_starts.size(), " rows. Pass 0 and 0 for a row that shares no keys.");
  for (size_t r = 0; r < cache_starts.size(); ++r) {
    const int64_t queries = row_starts[r + 1] - row_starts[r], shared = rows.shared(r), first = cache_starts[r] + shared;
    TORCH_CHECK_VALUE(
        shared >= 0 && first >= 0 && cache_lengths[r] >= shared + queries && k.sym_size(0) >= cache_starts[r] + cache_lengths[r],
        "[", op, "] row ", r, " must have its ", queries, " queries among its own keys, inside k; got keys [", first, ", ",
        cache_starts[r] + cache_lengths[r], ") of ", k.sym_size(0), " behind ", shared,
        " shared ones. Append the new keys to the cache first.");
    TORCH_CHECK_VALUE(shared == 0 || (shared_starts[r] >= 0 && k.sym_size(0) >= shared_starts[r] + shared), "[", op, "] row ", r,
                      " must have its ", shared, " shared keys inside k; got a start of ", shared ? shared_starts[r] : 0, " of ",
                      k.sym_size(0), ". Append them to the cache first.");
  }
}

inline void check_decode_attention(std::string_view op, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   const at::Tensor& cache_starts, const at::Tensor& cache_lengths, int64_t longest,
                                   const std::optional<at::Tensor>& shared_starts,
                                   const std::optional<at::Tensor>& shared_lengths) {
  check_heads(op, q, k, v);
  TORCH_CHECK_VALUE(shared_starts.has_value() == shared_lengths.has_value(), "[", op,
                    "] shared_starts and shared_lengths belong together; got one of them. Pass both, or neither.");
  for (const at::Tensor* each : {&cache_starts, &cache_lengths, shared_starts ? &*shared_starts : &cache_starts,
                                 shared_lengths ? &*shared_lengths : &cache_lengths}) {
    TORCH_CHECK_VALUE(
        each->scalar_type() == at::kLong && each->dim() == 1 && each->sym_size(0) == q.sym_size(0) && each->is_contiguous(), "[",
        op, "] cache_starts, cache_lengths and those of shared keys must be int64 and contiguous, one entry a query; got ",
        each->scalar_type(), " ", each->sym_sizes(), " for ", q.sym_size(0), " queries. Convert them.");
  }
  TORCH_CHECK_VALUE(longest >= 1, "[", op, "] longest must be at least 1; got ", longest, ". Pass the most keys that a row has.");
}

inline void check_scores(std::string_view op, const at::Tensor& scores) {
  TORCH_CHECK_VALUE(scores.scalar_type() == at::kFloat && scores.dim() == 2 && scores.is_contiguous() && scores.sym_size(1) > 0 &&
                        scores.sym_size(1) <= (1 << 23),
                    "[", op, "] scores must be (R, V) float32 and contiguous, V from 1 to 2^23; got ", scores.scalar_type(), " ",
                    scores.sym_sizes(), ". Convert them.");
}
inline void check_likely(std::string_view op, const at::Tensor& scores, int64_t top_k, double top_p, double min_p) {
  check_scores(op, scores);
  TORCH_CHECK_VALUE(top_k >= 0 && top_p >= 0 && top_p <= 1 && min_p >= 0 && min_p <= 1, "[", op,
                    "] top_k must be at least 0, top_p and min_p in [0, 1]; got ", top_k, ", ", top_p, " and ", min_p,
                    ". 0, 1 and 0 keep all tokens.");
}
inline void check_draws(std::string_view op, const at::Tensor& scores, const at::Tensor& draws) {
  check_scores(op, scores);
  TORCH_CHECK_VALUE(
      draws.scalar_type() == at::kDouble && draws.dim() == 1 && draws.sym_size(0) == scores.sym_size(0) && draws.is_contiguous(),
      "[", op, "] draws must be float64, one a row of scores; got ", draws.scalar_type(), " ", draws.sym_sizes(), " for ",
      scores.sym_size(0), " rows. Convert them.");
}

inline void check_embedding(std::string_view op, const at::Tensor& weight, const at::Tensor& tokens) {
  check_floating(op, "weight", weight);
  TORCH_CHECK_TYPE(tokens.scalar_type() == at::kLong, "[", op, "] tokens must be int64; got ", tokens.scalar_type(),
                   ". Convert them.");
  TORCH_CHECK_VALUE(weight.dim() == 2 && tokens.dim() == 1, "[", op, "] weight must be (V, D) and tokens (M); got ",
                    weight.sym_sizes(), " and ", tokens.sym_sizes(), ". Flatten batch and sequence.");
  if (weight.device() == tokens.device()) return;
  TORCH_CHECK_VALUE(weight.is_cpu() && (tokens.is_meta() || (tokens.is_cuda() && weight.is_pinned())), "[", op,
                    "] tokens must be on the device of weight, ", weight.device(),
                    ", or on a GPU and weight in pinned host memory; got ", tokens.device(), ". Move them, or pin the weight.");
}

inline void check_linear_cross_entropy(std::string_view op, const at::Tensor& hidden, const at::Tensor& weight,
                                       const at::Tensor& targets, const std::optional<at::Tensor>& grad_scale,
                                       const std::optional<at::Tensor>& statistics, int64_t chunk_rows) {
  check_floating(op, "hidden", hidden);
  check_alike(op, "weight", weight, "hidden", hidden);
  TORCH_CHECK_VALUE(hidden.dim() == 2 && weight.dim() == 2 && hidden.sym_size(1) == weight.sym_size(1) && weight.sym_size(0) > 0,
                    "[", op, "] hidden must be (M, D) and weight (V, D); got ", hidden.sym_sizes(), " and ", weight.sym_sizes(),
                    ". Flatten batch and sequence.");
  TORCH_CHECK_TYPE(targets.scalar_type() == at::kLong, "[", op, "] targets must be int64; got ", targets.scalar_type(),
                   ". Convert them.");
  TORCH_CHECK_VALUE(targets.dim() == 1 && targets.sym_size(0) == hidden.sym_size(0), "[", op, "] targets must be (M); got ",
                    targets.sym_sizes(), " for hidden ", hidden.sym_sizes(), ". Pass one target a row, negative to ignore it.");
  TORCH_CHECK_VALUE(chunk_rows > 0, "[", op, "] chunk_rows must be positive; got ", chunk_rows, ". 512 is a good value.");
  if (grad_scale.has_value() && grad_scale->defined()) {
    TORCH_CHECK_VALUE(grad_scale->sym_numel() == 1, "[", op, "] grad_scale must hold one number; got ", grad_scale->sym_sizes(),
                      ". Pass a 0-d tensor.");
  }
  if (!statistics.has_value()) return;
  TORCH_CHECK_VALUE(statistics->dim() == 1 && statistics->sym_size(0) == 2 && statistics->scalar_type() == at::kFloat &&
                        statistics->device() == hidden.device(),
                    "[", op, "] statistics must be float32 (2) on the device of hidden; got ", statistics->scalar_type(), " ",
                    statistics->sym_sizes(), " on ", statistics->device(), ". Pass torch.zeros(2, device=hidden.device).");
}

}  // namespace qlorapp::ops
