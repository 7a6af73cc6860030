// SPDX-License-Identifier: Apache-2.0
// The typed calls of the layer operators: each looks its operator up once and goes through the dispatcher, so that device,
// autograd and tracing are chosen by the arguments.
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include "ops/attention.hpp"
#include "ops/cross_entropy.hpp"
#include "ops/embedding.hpp"
#include "ops/norm.hpp"
#include "ops/operator.hpp"
#include "ops/rope.hpp"
#include "ops/swiglu.hpp"

namespace qlorapp::ops {
namespace {

using at::Tensor;
using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

}  // namespace

Two rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  static const auto op = Operator<Two(const Tensor&, const Tensor&, double)>("qlorapp::rms_norm");
  return op.call(x, weight, eps);
}

Three add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps) {
  static const auto op = Operator<Three(const Tensor&, const Tensor&, const Tensor&, double)>("qlorapp::add_rms_norm");
  return op.call(x, residual, weight, eps);
}

void rms_norm_out(const Tensor& x, const Tensor& weight, double eps, Tensor& y, Tensor& rstd) {
  static const auto op = Operator<void(const Tensor&, const Tensor&, double, Tensor&, Tensor&)>("qlorapp::rms_norm", "out");
  op.call(x, weight, eps, y, rstd);
}

void add_rms_norm_out(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps, Tensor& sum, Tensor& y,
                      Tensor& rstd) {
  static const auto op = Operator<void(const Tensor&, const Tensor&, const Tensor&, double, Tensor&, Tensor&, Tensor&)>(
      "qlorapp::add_rms_norm", "out");
  op.call(x, residual, weight, eps, sum, y, rstd);
}

void rope_backward_qkv_(Tensor& dqkv, const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& cos, const Tensor& sin,
                        const Tensor& positions) {
  static const auto op =
      Operator<void(Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&)>(
          "qlorapp::rope_backward_qkv_");
  op.call(dqkv, dq, dk, dv, cos, sin, positions);
}

void swiglu_out(const Tensor& gate_up, Tensor& h) {
  static const auto op = Operator<void(const Tensor&, Tensor&)>("qlorapp::swiglu", "out");
  op.call(gate_up, h);
}

Tensor embedding(const Tensor& weight, const Tensor& tokens) {
  static const auto op = Operator<Tensor(const Tensor&, const Tensor&)>("qlorapp::embedding");
  return op.call(weight, tokens);
}

Tensor rms_norm_backward(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& rstd) {
  static const auto op = Operator<Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&)>("qlorapp::rms_norm_backward");
  return op.call(dy, x, weight, rstd);
}

void rms_norm_backward_(Tensor& dx, Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& rstd) {
  static const auto op =
      Operator<void(Tensor&, Tensor&, const Tensor&, const Tensor&, const Tensor&)>("qlorapp::rms_norm_backward_");
  op.call(dx, dy, x, weight, rstd);
}

Tensor rope(const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& positions, bool inverse) {
  static const auto op = Operator<Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, bool)>("qlorapp::rope");
  return op.call(x, cos, sin, positions, inverse);
}

void rope_(Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& positions, bool inverse) {
  static const auto op = Operator<void(Tensor&, const Tensor&, const Tensor&, const Tensor&, bool)>("qlorapp::rope_");
  op.call(x, cos, sin, positions, inverse);
}

Tensor swiglu(const Tensor& gate_up) {
  static const auto op = Operator<Tensor(const Tensor&)>("qlorapp::swiglu");
  return op.call(gate_up);
}

Tensor swiglu_backward(const Tensor& dh, const Tensor& gate_up) {
  static const auto op = Operator<Tensor(const Tensor&, const Tensor&)>("qlorapp::swiglu_backward");
  return op.call(dh, gate_up);
}

void swiglu_backward_(Tensor& dh, Tensor& gate_up) {
  static const auto op = Operator<void(Tensor&, Tensor&)>("qlorapp::swiglu_backward_");
  op.call(dh, gate_up);
}

Two attention(const Tensor& q, const Tensor& k, const Tensor& v, at::IntArrayRef row_starts, double scale, bool deterministic) {
  static const auto op =
      Operator<Two(const Tensor&, const Tensor&, const Tensor&, at::IntArrayRef, double, bool)>("qlorapp::attention");
  return op.call(q, k, v, row_starts, scale, deterministic);
}

Three attention_backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                         const Tensor& lse, at::IntArrayRef row_starts, double scale, bool deterministic) {
  static const auto op = Operator<Three(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                        at::IntArrayRef, double, bool)>("qlorapp::attention_backward");
  return op.call(dout, q, k, v, out, lse, row_starts, scale, deterministic);
}

Tensor attention_with_cache(const Tensor& q, const Tensor& k, const Tensor& v, at::IntArrayRef row_starts,
                            at::IntArrayRef cache_starts, at::IntArrayRef cache_lengths, double scale) {
  static const auto op =
      Operator<Tensor(const Tensor&, const Tensor&, const Tensor&, at::IntArrayRef, at::IntArrayRef, at::IntArrayRef, double)>(
          "qlorapp::attention_with_cache");
  return op.call(q, k, v, row_starts, cache_starts, cache_lengths, scale);
}

Two linear_cross_entropy(const Tensor& hidden, const Tensor& weight, const Tensor& targets, const std::optional<Tensor>& grad_scale,
                         bool need_gradient, int64_t chunk_rows, int64_t target_count) {
  static const auto op =
      Operator<Two(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, bool, int64_t, int64_t)>(
          "qlorapp::linear_cross_entropy");
  return op.call(hidden, weight, targets, grad_scale, need_gradient, chunk_rows, target_count);
}

}  // namespace qlorapp::ops
