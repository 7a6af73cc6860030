// SPDX-License-Identifier: Apache-2.0
// The typed calls of the layer operators: each looks its operator up once and goes through the dispatcher, so that device,
// autograd and tracing are chosen by the arguments.
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include "ops/attention.hpp"
#include "ops/cross_entropy.hpp"
#include "ops/embedding.hpp"
#include "ops/gated_activation.hpp"
#include "ops/norm.hpp"
#include "ops/operator.hpp"
#include "ops/rope.hpp"
#include "ops/sampling.hpp"

namespace qlorapp::ops {
namespace {

using at::Tensor;
using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

int64_t number(NormRule rule) { return static_cast<int64_t>(rule); }
int64_t number(Activation act) { return static_cast<int64_t>(act); }

}  // namespace

Two rms_norm(const Tensor& x, const Tensor& weight, double eps, NormRule rule) {
  static const auto op = Operator<Two(const Tensor&, const Tensor&, double, int64_t)>("qlorapp::rms_norm");
  return op.call(x, weight, eps, number(rule));
}

Three add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps, NormRule rule) {
  static const auto op = Operator<Three(const Tensor&, const Tensor&, const Tensor&, double, int64_t)>("qlorapp::add_rms_norm");
  return op.call(x, residual, weight, eps, number(rule));
}

void rms_norm_out(const Tensor& x, const Tensor& weight, double eps, Tensor& y, Tensor& rstd, NormRule rule) {
  static const auto op =
      Operator<void(const Tensor&, const Tensor&, double, int64_t, Tensor&, Tensor&)>("qlorapp::rms_norm", "out");
  op.call(x, weight, eps, number(rule), y, rstd);
}

void add_rms_norm_out(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps, Tensor& sum, Tensor& y,
                      Tensor& rstd, NormRule rule) {
  static const auto op = Operator<void(const Tensor&, const Tensor&, const Tensor&, double, int64_t, Tensor&, Tensor&, Tensor&)>(
      "qlorapp::add_rms_norm", "out");
  op.call(x, residual, weight, eps, number(rule), sum, y, rstd);
}

void rope_backward_qkv_(Tensor& dqkv, const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& cos, const Tensor& sin,
                        const Tensor& positions, bool interleaved) {
  static const auto op =
      Operator<void(Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, bool)>(
          "qlorapp::rope_backward_qkv_");
  op.call(dqkv, dq, dk, dv, cos, sin, positions, interleaved);
}

void gated_activation_out(const Tensor& gate_up, Tensor& h, Activation act) {
  static const auto op = Operator<void(const Tensor&, int64_t, Tensor&)>("qlorapp::gated_activation", "out");
  op.call(gate_up, number(act), h);
}

Tensor embedding(const Tensor& weight, const Tensor& tokens) {
  static const auto op = Operator<Tensor(const Tensor&, const Tensor&)>("qlorapp::embedding");
  return op.call(weight, tokens);
}

void keep_likely_tokens_(Tensor& scores, int64_t top_k, double top_p, double min_p) {
  static const auto op = Operator<void(Tensor&, int64_t, double, double)>("qlorapp::keep_likely_tokens_");
  op.call(scores, top_k, top_p, min_p);
}

Tensor draw_tokens(const Tensor& scores, const Tensor& draws) {
  static const auto op = Operator<Tensor(const Tensor&, const Tensor&)>("qlorapp::draw_tokens");
  return op.call(scores, draws);
}

Tensor rms_norm_backward(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& rstd, NormRule rule) {
  static const auto op =
      Operator<Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t)>("qlorapp::rms_norm_backward");
  return op.call(dy, x, weight, rstd, number(rule));
}

void rms_norm_backward_(Tensor& dx, Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& rstd, NormRule rule) {
  static const auto op =
      Operator<void(Tensor&, Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t)>("qlorapp::rms_norm_backward_");
  op.call(dx, dy, x, weight, rstd, number(rule));
}

Tensor rope(const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& positions, bool inverse, bool interleaved) {
  static const auto op = Operator<Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, bool, bool)>("qlorapp::rope");
  return op.call(x, cos, sin, positions, inverse, interleaved);
}

void rope_(Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& positions, bool inverse, bool interleaved) {
  static const auto op = Operator<void(Tensor&, const Tensor&, const Tensor&, const Tensor&, bool, bool)>("qlorapp::rope_");
  op.call(x, cos, sin, positions, inverse, interleaved);
}

Tensor rms_norm_rope(const Tensor& x, const Tensor& q_weight, const Tensor& k_weight, int64_t q_heads, double eps,
                     const Tensor& cos, const Tensor& sin, const Tensor& positions, NormRule rule) {
  static const auto op = Operator<Tensor(const Tensor&, const Tensor&, const Tensor&, int64_t, double, const Tensor&, const Tensor&,
                                         const Tensor&, int64_t)>("qlorapp::rms_norm_rope");
  return op.call(x, q_weight, k_weight, q_heads, eps, cos, sin, positions, number(rule));
}

void rms_norm_rope_backward_qkv_(Tensor& dqkv, const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& x,
                                 const Tensor& q_weight, const Tensor& k_weight, double eps, const Tensor& cos, const Tensor& sin,
                                 const Tensor& positions, NormRule rule) {
  static const auto op =
      Operator<void(Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, double,
                    const Tensor&, const Tensor&, const Tensor&, int64_t)>("qlorapp::rms_norm_rope_backward_qkv_");
  op.call(dqkv, dq, dk, dv, x, q_weight, k_weight, eps, cos, sin, positions, number(rule));
}

Tensor gated_activation(const Tensor& gate_up, Activation act) {
  static const auto op = Operator<Tensor(const Tensor&, int64_t)>("qlorapp::gated_activation");
  return op.call(gate_up, number(act));
}

Tensor gated_activation_backward(const Tensor& dh, const Tensor& gate_up, Activation act) {
  static const auto op = Operator<Tensor(const Tensor&, const Tensor&, int64_t)>("qlorapp::gated_activation_backward");
  return op.call(dh, gate_up, number(act));
}

void gated_activation_backward_(Tensor& dh, Tensor& gate_up, Activation act) {
  static const auto op = Operator<void(Tensor&, Tensor&, int64_t)>("qlorapp::gated_activation_backward_");
  op.call(dh, gate_up, number(act));
}

Two attention(const Tensor& q, const Tensor& k, const Tensor& v, at::IntArrayRef row_starts, double scale, bool deterministic,
              int64_t window) {
  static const auto op =
      Operator<Two(const Tensor&, const Tensor&, const Tensor&, at::IntArrayRef, double, bool, int64_t)>("qlorapp::attention");
  return op.call(q, k, v, row_starts, scale, deterministic, window);
}

Three attention_backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                         const Tensor& lse, at::IntArrayRef row_starts, double scale, bool deterministic, int64_t window) {
  static const auto op = Operator<Three(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                        at::IntArrayRef, double, bool, int64_t)>("qlorapp::attention_backward");
  return op.call(dout, q, k, v, out, lse, row_starts, scale, deterministic, window);
}

Tensor attention_with_cache(const Tensor& q, const Tensor& k, const Tensor& v, at::IntArrayRef row_starts,
                            at::IntArrayRef cache_starts, at::IntArrayRef cache_lengths, double scale, int64_t window,
                            at::IntArrayRef shared_starts, at::IntArrayRef shared_lengths) {
  static const auto op =
      Operator<Tensor(const Tensor&, const Tensor&, const Tensor&, at::IntArrayRef, at::IntArrayRef, at::IntArrayRef, double,
                      int64_t, at::IntArrayRef, at::IntArrayRef)>("qlorapp::attention_with_cache");
  return op.call(q, k, v, row_starts, cache_starts, cache_lengths, scale, window, shared_starts, shared_lengths);
}

Tensor decode_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cache_starts, const Tensor& cache_lengths,
                        int64_t longest, double scale, int64_t window, const std::optional<Tensor>& shared_starts,
                        const std::optional<Tensor>& shared_lengths) {
  static const auto op =
      Operator<Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t, double, int64_t,
                      const std::optional<Tensor>&, const std::optional<Tensor>&)>("qlorapp::decode_attention");
  return op.call(q, k, v, cache_starts, cache_lengths, longest, scale, window, shared_starts, shared_lengths);
}

bool has_decode_attention(at::Device device, at::ScalarType dtype, int64_t head_dim) {
  if (!device.is_cuda()) return false;
  static const auto op = Operator<bool(at::ScalarType, int64_t, int64_t)>("qlorapp::has_decode_attention");
  return op.call(dtype, head_dim, device.index());
}

Two linear_cross_entropy(const Tensor& hidden, const Tensor& weight, const Tensor& targets, const std::optional<Tensor>& grad_scale,
                         bool need_gradient, int64_t chunk_rows, int64_t target_count, LogitRule logits,
                         const std::optional<Tensor>& statistics) {
  static const auto op = Operator<Two(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, bool, int64_t,
                                      int64_t, double, double, const std::optional<Tensor>&)>("qlorapp::linear_cross_entropy");
  return op.call(hidden, weight, targets, grad_scale, need_gradient, chunk_rows, target_count, logits.factor, logits.cap,
                 statistics);
}

}  // namespace qlorapp::ops
