// SPDX-License-Identifier: Apache-2.0
// Derivatives of the layer operators. Gradients go to activations; norm weights and the head are frozen, and one that asks for
// a gradient is refused instead of ignored. Backwards call registered operators, so that every device brings its own.
#include <string_view>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "../layer_shapes.hpp"
#include "ops/attention.hpp"
#include "ops/cross_entropy.hpp"
#include "ops/gated_activation.hpp"
#include "ops/no_autocast.hpp"
#include "ops/norm.hpp"
#include "ops/operator.hpp"
#include "ops/rope.hpp"
#include "qlorapp/core/error.hpp"

namespace qlorapp::ops::autograd {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::Variable;
using torch::autograd::variable_list;

bool wants_gradient(const Tensor& x) { return at::GradMode::is_enabled() && x.requires_grad(); }

void check_frozen(std::string_view op, std::string_view what, const Tensor& weight) {
  TORCH_CHECK_VALUE(!wants_gradient(weight), "[", op, "] ", what,
                    " is frozen here: gradients go to activations and adapters; got a weight that requires one. Call "
                    "weight.requires_grad_(false).");
}

NormRule rule_of(AutogradContext* ctx) { return norm_rule(ctx->saved_data["rule"].toInt()); }

struct RmsNorm : Function<RmsNorm> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, double eps, int64_t rule) {
    const BelowAutograd below;
    ctx->saved_data["rule"] = rule;
    auto [y, rstd] = ops::rms_norm(x, weight, eps, norm_rule(rule));
    ctx->mark_non_differentiable({rstd});
    ctx->save_for_backward({x, weight, rstd});
    return {y, rstd};
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const NoAutocast no_autocast;
    const auto saved = ctx->get_saved_variables();
    return {ops::rms_norm_backward(grads[0], saved[0], saved[1], saved[2], rule_of(ctx)), Variable(), Variable(), Variable()};
  }
};

struct AddRmsNorm : Function<AddRmsNorm> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& residual, const Tensor& weight, double eps,
                               int64_t rule) {
    const BelowAutograd below;
    ctx->saved_data["rule"] = rule;
    auto [sum, y, rstd] = ops::add_rms_norm(x, residual, weight, eps, norm_rule(rule));
    ctx->mark_non_differentiable({rstd});
    ctx->save_for_backward({sum, weight, rstd});
    return {sum, y, rstd};
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const NoAutocast no_autocast;
    const auto saved = ctx->get_saved_variables();
    const Tensor gradient = grads[0] + ops::rms_norm_backward(grads[1], saved[0], saved[1], saved[2], rule_of(ctx));
    return {gradient, gradient, Variable(), Variable(), Variable()};
  }
};

struct Rope : Function<Rope> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& positions,
                        bool inverse, bool interleaved) {
    const BelowAutograd below;
    ctx->save_for_backward({cos, sin, positions});
    ctx->saved_data["inverse"] = inverse;
    ctx->saved_data["interleaved"] = interleaved;
    return ops::rope(x, cos, sin, positions, inverse, interleaved);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const NoAutocast no_autocast;
    const auto saved = ctx->get_saved_variables();
    const bool inverse = ctx->saved_data["inverse"].toBool(), interleaved = ctx->saved_data["interleaved"].toBool();
    const Tensor dx = ops::rope(grads[0], saved[0], saved[1], saved[2], !inverse, interleaved);
    return {dx, Variable(), Variable(), Variable(), Variable(), Variable()};
  }
};

/// The backward pass is that of its two steps.
struct RmsNormRope : Function<RmsNormRope> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& q_weight, const Tensor& k_weight, int64_t q_heads,
                        double eps, const Tensor& cos, const Tensor& sin, const Tensor& positions, int64_t rule) {
    const BelowAutograd below;
    ctx->save_for_backward({x, q_weight, k_weight, cos, sin, positions});
    ctx->saved_data["q_heads"] = q_heads;
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["rule"] = rule;
    return ops::rms_norm_rope(x, q_weight, k_weight, q_heads, eps, cos, sin, positions, norm_rule(rule));
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const NoAutocast no_autocast;
    const auto saved = ctx->get_saved_variables();
    const int64_t q_heads = ctx->saved_data["q_heads"].toInt(), heads = saved[0].size(1);
    const Tensor dy = ops::rope(grads[0], saved[3], saved[4], saved[5], /*inverse=*/true);
    const auto back = [&](int64_t first, int64_t count, const Tensor& weight) {
      const Tensor x = saved[0].narrow(1, first, count);
      const Tensor rstd = std::get<1>(ops::rms_norm(x, weight, ctx->saved_data["eps"].toDouble(), rule_of(ctx)));
      return ops::rms_norm_backward(dy.narrow(1, first, count), x, weight, rstd, rule_of(ctx));
    };
    const Tensor dx = at::cat({back(0, q_heads, saved[1]), back(q_heads, heads - q_heads, saved[2])}, 1);
    return {dx, Variable(), Variable(), Variable(), Variable(), Variable(), Variable(), Variable(), Variable()};
  }
};

struct GatedActivation : Function<GatedActivation> {
  static Tensor forward(AutogradContext* ctx, const Tensor& gate_up, int64_t act) {
    const BelowAutograd below;
    ctx->save_for_backward({gate_up});
    ctx->saved_data["act"] = act;
    return ops::gated_activation(gate_up, activation(act));
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const NoAutocast no_autocast;
    return {ops::gated_activation_backward(grads[0], ctx->get_saved_variables()[0], activation(ctx->saved_data["act"].toInt())),
            Variable()};
  }
};

struct Attention : Function<Attention> {
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v, at::IntArrayRef row_starts,
                               double scale, bool deterministic, int64_t window) {
    const BelowAutograd below;
    auto [out, lse] = ops::attention(q, k, v, row_starts, scale, deterministic, window);
    ctx->mark_non_differentiable({lse});
    ctx->save_for_backward({q, k, v, out, lse});
    ctx->saved_data["row_starts"] = row_starts.vec();
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["deterministic"] = deterministic;
    ctx->saved_data["window"] = window;
    return {out, lse};
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const NoAutocast no_autocast;
    const auto saved = ctx->get_saved_variables();
    auto [dq, dk, dv] = ops::attention_backward(grads[0], saved[0], saved[1], saved[2], saved[3], saved[4],
                                                ctx->saved_data["row_starts"].toIntVector(), ctx->saved_data["scale"].toDouble(),
                                                ctx->saved_data["deterministic"].toBool(), ctx->saved_data["window"].toInt());
    return {dq, dk, dv, Variable(), Variable(), Variable(), Variable()};
  }
};

struct LinearCrossEntropy : Function<LinearCrossEntropy> {
  static variable_list forward(AutogradContext* ctx, const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                               const std::optional<Tensor>& grad_scale, int64_t chunk_rows, int64_t target_count, double factor,
                               double cap, const std::optional<Tensor>& statistics) {
    const BelowAutograd below;
    auto [loss, gradient] =
        ops::linear_cross_entropy(hidden, weight, targets, grad_scale, true, chunk_rows, target_count, {factor, cap}, statistics);
    ctx->mark_non_differentiable({gradient});
    ctx->save_for_backward({gradient, grad_scale.value_or(Tensor())});
    return {loss, gradient};
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const NoAutocast no_autocast;
    const auto saved = ctx->get_saved_variables();
    if (at::GradMode::is_enabled()) {  // autograd's engine passes it on as it is
      throw Error("[linear_cross_entropy] has no second derivative; got create_graph=True. Differentiate once.");
    }
    const Tensor upstream = saved[1].defined() ? grads[0] / saved[1].reshape({}) : grads[0];
    Tensor gradient = at::empty_like(saved[0]);
    at::mul_out(gradient, saved[0], upstream.reshape({1}));  // one-dimensional: else it is rounded to 16 bits before the product
    return {gradient, Variable(), Variable(), Variable(), Variable(), Variable(), Variable(), Variable(), Variable()};
  }
};

std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, const Tensor& weight, double eps, int64_t rule) {
  check_frozen("rms_norm", "the norm's weight", weight);
  const auto results = RmsNorm::apply(x, weight, eps, rule);
  return {results[0], results[1]};
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps,
                                                int64_t rule) {
  check_frozen("add_rms_norm", "the norm's weight", weight);
  const auto results = AddRmsNorm::apply(x, residual, weight, eps, rule);
  return {results[0], results[1], results[2]};
}

Tensor rope(const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& positions, bool inverse, bool interleaved) {
  return Rope::apply(x, cos, sin, positions, inverse, interleaved);
}

Tensor rms_norm_rope(const Tensor& x, const Tensor& q_weight, const Tensor& k_weight, int64_t q_heads, double eps,
                     const Tensor& cos, const Tensor& sin, const Tensor& positions, int64_t rule) {
  for (const Tensor* weight : {&q_weight, &k_weight}) check_frozen("rms_norm_rope", "the norm's weight", *weight);
  return RmsNormRope::apply(x, q_weight, k_weight, q_heads, eps, cos, sin, positions, rule);
}

Tensor gated_activation(const Tensor& gate_up, int64_t act) { return GatedActivation::apply(gate_up, act); }

std::tuple<Tensor, Tensor> attention(const Tensor& q, const Tensor& k, const Tensor& v, at::IntArrayRef row_starts, double scale,
                                     bool deterministic, int64_t window) {
  const auto results = Attention::apply(q, k, v, row_starts, scale, deterministic, window);
  return {results[0], results[1]};
}

std::tuple<Tensor, Tensor> linear_cross_entropy(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                                                const std::optional<Tensor>& grad_scale, bool need_gradient, int64_t chunk_rows,
                                                int64_t target_count, double factor, double cap,
                                                const std::optional<Tensor>& statistics) {
  check_frozen("linear_cross_entropy", "the output head", weight);
  if (!wants_gradient(hidden)) {
    const BelowAutograd below;
    return ops::linear_cross_entropy(hidden, weight, targets, grad_scale, need_gradient, chunk_rows, target_count, {factor, cap},
                                     statistics);
  }
  const auto results =
      LinearCrossEntropy::apply(hidden, weight, targets, grad_scale, chunk_rows, target_count, factor, cap, statistics);
  return {results[0], results[1]};
}

/// Operators that write their arguments stand outside autograd; a version count still tells other graphs of the write.
template <class... Written>
void check_outside_autograd(std::string_view op, const Written&... written) {
  TORCH_CHECK_VALUE(!(wants_gradient(written) || ...), "[", op,
                    "] writes its arguments and is not differentiable; got one that requires a gradient. Call the operator without "
                    "the underscore, or this one under no_grad.");
}
template <class... Written>
void count_write(const Written&... written) {
  ((written.is_inference() ? void() : written.unsafeGetTensorImpl()->bump_version()), ...);
}

void rms_norm_out(const Tensor& x, const Tensor& weight, double eps, int64_t rule, Tensor& y, Tensor& rstd) {
  check_outside_autograd("rms_norm.out", x, weight, y, rstd);
  const BelowAutograd below;
  ops::rms_norm_out(x, weight, eps, y, rstd, norm_rule(rule));
  count_write(y, rstd);
}

void add_rms_norm_out(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps, int64_t rule, Tensor& sum,
                      Tensor& y, Tensor& rstd) {
  check_outside_autograd("add_rms_norm.out", x, residual, weight, sum, y, rstd);
  const BelowAutograd below;
  ops::add_rms_norm_out(x, residual, weight, eps, sum, y, rstd, norm_rule(rule));
  count_write(sum, y, rstd);
}

void gated_activation_out(const Tensor& gate_up, int64_t act, Tensor& h) {
  check_outside_autograd("gated_activation.out", gate_up, h);
  const BelowAutograd below;
  ops::gated_activation_out(gate_up, h, activation(act));
  count_write(h);
}

void rope_backward_qkv_(Tensor& dqkv, const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& cos, const Tensor& sin,
                        const Tensor& positions, bool interleaved) {
  check_outside_autograd("rope_backward_qkv_", dqkv, dq, dk, dv, cos, sin);
  const BelowAutograd below;
  ops::rope_backward_qkv_(dqkv, dq, dk, dv, cos, sin, positions, interleaved);
  count_write(dqkv);
}

void rms_norm_rope_backward_qkv_(Tensor& dqkv, const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& x,
                                 const Tensor& q_weight, const Tensor& k_weight, double eps, const Tensor& cos, const Tensor& sin,
                                 const Tensor& positions, int64_t rule) {
  check_outside_autograd("rms_norm_rope_backward_qkv_", dqkv, dq, dk, dv, x, q_weight, k_weight, cos, sin);
  const BelowAutograd below;
  ops::rms_norm_rope_backward_qkv_(dqkv, dq, dk, dv, x, q_weight, k_weight, eps, cos, sin, positions, norm_rule(rule));
  count_write(dqkv);
}

void rms_norm_backward_(Tensor& dx, Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& rstd, int64_t rule) {
  check_outside_autograd("rms_norm_backward_", dx, dy, x, weight, rstd);
  const BelowAutograd below;
  ops::rms_norm_backward_(dx, dy, x, weight, rstd, norm_rule(rule));
  count_write(dx);
}

void rope_(Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& positions, bool inverse, bool interleaved) {
  check_outside_autograd("rope_", x, cos, sin);
  const BelowAutograd below;
  ops::rope_(x, cos, sin, positions, inverse, interleaved);
  count_write(x);
}

void gated_activation_backward_(Tensor& dh, Tensor& gate_up, int64_t act) {
  check_outside_autograd("gated_activation_backward_", dh, gate_up);
  const BelowAutograd below;
  ops::gated_activation_backward_(dh, gate_up, activation(act));
  count_write(dh, gate_up);
}

}  // namespace

TORCH_LIBRARY_IMPL(qlorapp, Autograd, m) {
  m.impl("rms_norm", rms_norm);
  m.impl("add_rms_norm", add_rms_norm);
  m.impl("rope", rope);
  m.impl("gated_activation", gated_activation);
  m.impl("attention", attention);
  m.impl("linear_cross_entropy", linear_cross_entropy);
  m.impl("rms_norm.out", rms_norm_out);
  m.impl("add_rms_norm.out", add_rms_norm_out);
  m.impl("gated_activation.out", gated_activation_out);
  m.impl("rope_backward_qkv_", rope_backward_qkv_);
  m.impl("rms_norm_rope", rms_norm_rope);
  m.impl("rms_norm_rope_backward_qkv_", rms_norm_rope_backward_qkv_);
  m.impl("rms_norm_backward_", rms_norm_backward_);
  m.impl("rope_", rope_);
  m.impl("gated_activation_backward_", gated_activation_backward_);
  // Not differentiable (again): the forward call works, a backward through it names the operator.
  m.impl("rms_norm_backward", torch::autograd::autogradNotImplementedFallback());
  m.impl("gated_activation_backward", torch::autograd::autogradNotImplementedFallback());
  m.impl("attention_backward", torch::autograd::autogradNotImplementedFallback());
  m.impl("embedding", torch::autograd::autogradNotImplementedFallback());
  m.impl("attention_with_cache", torch::autograd::autogradNotImplementedFallback());
  m.impl("decode_attention", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace qlorapp::ops::autograd
