// SPDX-License-Identifier: Apache-2.0
// Shapes, dtypes and layouts of the layer operators' results, for tracing and planning; sizes may be symbolic.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "../layer_shapes.hpp"
#include "kernel_memory.hpp"
#include "ops/memory_tape.hpp"

namespace qlorapp::ops {
namespace {

using at::Tensor;

Tensor empty(c10::SymIntArrayRef sizes, const Tensor& like, at::ScalarType dtype) {
  return at::empty_symint(sizes, like.options().dtype(dtype));
}
Tensor empty(c10::SymIntArrayRef sizes, const Tensor& like) { return empty(sizes, like, like.scalar_type()); }

Tensor empty_statistic(const Tensor& x) { return empty(x.sym_sizes().slice(0, x.sym_sizes().size() - 1), x, accumulate_type(x)); }

std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, const Tensor& weight, double, int64_t) {
  check_rms_norm("rms_norm", x, weight);
  return {empty(x.sym_sizes(), x), empty_statistic(x)};
}

void rms_norm_out(const Tensor& x, const Tensor& weight, double, int64_t, Tensor& y, Tensor& rstd) {
  check_rms_norm("rms_norm", x, weight);
  check_rms_norm_out("rms_norm", x, y, rstd);
}

Tensor rms_norm_backward(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& rstd, int64_t) {
  check_rms_norm_backward("rms_norm_backward", dy, x, weight, rstd);
  return empty(x.sym_sizes(), x);
}

void rms_norm_backward_(Tensor& dx, Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& rstd, int64_t) {
  check_rms_norm_backward("rms_norm_backward_", dy, x, weight, rstd);
  check_same_shape("rms_norm_backward_", "dx", dx, "x", x);
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double, int64_t) {
  check_rms_norm("add_rms_norm", x, weight);
  check_same_shape("add_rms_norm", "residual", residual, "x", x);
  return {empty(x.sym_sizes(), x), empty(x.sym_sizes(), x), empty_statistic(x)};
}

void add_rms_norm_out(const Tensor& x, const Tensor& residual, const Tensor& weight, double, int64_t, Tensor& sum, Tensor& y,
                      Tensor& rstd) {
  check_rms_norm("add_rms_norm", x, weight);
  check_same_shape("add_rms_norm", "residual", residual, "x", x);
  check_same_shape("add_rms_norm", "sum", sum, "x", x);
  check_rms_norm_out("add_rms_norm", x, y, rstd);
}

Tensor rope(const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& positions, bool, bool) {
  check_rope("rope", x, cos, sin, positions);
  return empty(x.sym_sizes(), x);
}

void rope_(Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& positions, bool, bool) {
  check_rope("rope_", x, cos, sin, positions);
}

void rope_backward_qkv_(Tensor& dqkv, const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& cos, const Tensor& sin,
                        const Tensor& positions, bool) {
  check_rope_backward_qkv("rope_backward_qkv_", dqkv, dq, dk, dv, cos, sin, positions);
}

Tensor rms_norm_rope(const Tensor& x, const Tensor& q_weight, const Tensor& k_weight, int64_t q_heads, double, const Tensor& cos,
                     const Tensor& sin, const Tensor& positions, int64_t) {
  check_rms_norm_rope("rms_norm_rope", x, q_weight, k_weight, q_heads, cos, sin, positions);
  return empty(x.sym_sizes(), x);
}

void rms_norm_rope_backward_qkv_(Tensor& dqkv, const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& x,
                                 const Tensor& q_weight, const Tensor& k_weight, double, const Tensor& cos, const Tensor& sin,
                                 const Tensor& positions, int64_t) {
  check_rms_norm_rope_backward("rms_norm_rope_backward_qkv_", dqkv, dq, dk, dv, x, q_weight, k_weight, cos, sin, positions);
}

Tensor gated_activation(const Tensor& gate_up, int64_t) {
  check_gated_activation("gated_activation", gate_up);
  auto shape = gate_up.sym_sizes().vec();
  shape.back() = shape.back() / 2;
  return empty(shape, gate_up);
}

void gated_activation_out(const Tensor& gate_up, int64_t, Tensor& h) { check_gated_activation_out("gated_activation", gate_up, h); }

Tensor gated_activation_backward(const Tensor& dh, const Tensor& gate_up, int64_t) {
  check_gated_activation_backward("gated_activation_backward", dh, gate_up);
  return empty(gate_up.sym_sizes(), gate_up);
}

void gated_activation_backward_(Tensor& dh, Tensor& gate_up, int64_t) {
  check_gated_activation_backward("gated_activation_backward_", dh, gate_up);
}

std::tuple<Tensor, Tensor> attention(const Tensor& q, const Tensor& k, const Tensor& v, at::IntArrayRef row_starts, double,
                                     bool deterministic, int64_t window) {
  check_attention("attention", q, k, v, row_starts);
  const meta::Scratch scratch =
      planned_device() ? meta::attention_scratch(q, k, row_starts, deterministic, window) : meta::Scratch();
  return {empty(q.sym_sizes(), q), empty({q.sym_size(1), q.sym_size(0)}, q, accumulate_type(q))};
}

std::tuple<Tensor, Tensor, Tensor> attention_backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                                                      const Tensor& out, const Tensor& lse, at::IntArrayRef row_starts, double,
                                                      bool deterministic, int64_t window) {
  check_attention_backward("attention_backward", dout, q, k, v, out, lse, row_starts);
  const meta::Scratch scratch =
      planned_device() ? meta::attention_backward_scratch(q, k, row_starts, deterministic, window) : meta::Scratch();
  return {empty(q.sym_sizes(), q), empty(k.sym_sizes(), k), empty(v.sym_sizes(), v)};
}

Tensor attention_with_cache(const Tensor& q, const Tensor& k, const Tensor& v, at::IntArrayRef row_starts,
                            at::IntArrayRef cache_starts, at::IntArrayRef cache_lengths, double, int64_t window,
                            at::IntArrayRef shared_starts, at::IntArrayRef shared_lengths) {
  check_attention_with_cache("attention_with_cache", q, k, v, row_starts,
                             {cache_starts, cache_lengths, shared_starts, shared_lengths});
  const meta::Scratch scratch =
      planned_device() ? meta::cached_attention_scratch(q, row_starts, cache_lengths, window) : meta::Scratch();
  return empty(q.sym_sizes(), q);
}

Tensor decode_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cache_starts, const Tensor& cache_lengths,
                        int64_t longest, double, int64_t, const std::optional<Tensor>& shared_starts,
                        const std::optional<Tensor>& shared_lengths) {
  check_decode_attention("decode_attention", q, k, v, cache_starts, cache_lengths, longest, shared_starts, shared_lengths);
  return empty(q.sym_sizes(), q);
}

Tensor embedding(const Tensor& weight, const Tensor& tokens) {
  check_embedding("embedding", weight, tokens);
  return at::empty_symint({tokens.sym_size(0), weight.sym_size(1)}, weight.options().device(tokens.device()));
}

void keep_likely_tokens_(Tensor& scores, int64_t top_k, double top_p, double min_p) {
  check_likely("keep_likely_tokens_", scores, top_k, top_p, min_p);
}

Tensor draw_tokens(const Tensor& scores, const Tensor& draws) {
  check_draws("draw_tokens", scores, draws);
  return at::empty_symint({scores.sym_size(0)}, scores.options().dtype(at::kLong));
}

std::tuple<Tensor, Tensor> linear_cross_entropy(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                                                const std::optional<Tensor>& grad_scale, bool need_gradient, int64_t chunk_rows,
                                                int64_t target_count, double, double, const std::optional<Tensor>& statistics) {
  check_linear_cross_entropy("linear_cross_entropy", hidden, weight, targets, grad_scale, statistics, chunk_rows);
  if (planned_device()) return meta::linear_cross_entropy_planned(hidden, weight, targets, need_gradient, chunk_rows, target_count);
  return {empty({}, hidden, accumulate_type(hidden)),
          need_gradient ? empty(hidden.sym_sizes(), hidden) : empty({c10::SymInt(0)}, hidden)};
}

}  // namespace

TORCH_LIBRARY_IMPL(qlorapp, Meta, m) {
  m.impl("rms_norm", rms_norm);
  m.impl("rms_norm.out", rms_norm_out);
  m.impl("add_rms_norm.out", add_rms_norm_out);
  m.impl("rope_backward_qkv_", rope_backward_qkv_);
  m.impl("rms_norm_rope", rms_norm_rope);
  m.impl("rms_norm_rope_backward_qkv_", rms_norm_rope_backward_qkv_);
  m.impl("gated_activation.out", gated_activation_out);
  m.impl("embedding", embedding);
  m.impl("rms_norm_backward", rms_norm_backward);
  m.impl("rms_norm_backward_", rms_norm_backward_);
  m.impl("add_rms_norm", add_rms_norm);
  m.impl("rope", rope);
  m.impl("rope_", rope_);
  m.impl("gated_activation", gated_activation);
  m.impl("gated_activation_backward", gated_activation_backward);
  m.impl("gated_activation_backward_", gated_activation_backward_);
  m.impl("attention", attention);
  m.impl("attention_backward", attention_backward);
  m.impl("attention_with_cache", attention_with_cache);
  m.impl("decode_attention", decode_attention);
  m.impl("keep_likely_tokens_", keep_likely_tokens_);
  m.impl("draw_tokens", draw_tokens);
  m.impl("linear_cross_entropy", linear_cross_entropy);
}

}  // namespace qlorapp::ops
