// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/nn/decoder_block.hpp"

#include <ATen/ATen.h>

#include <cmath>
#include <utility>

#include "qlorapp/core/check.hpp"
#include "qlorapp/ops/attention.hpp"
#include "qlorapp/ops/norm.hpp"
#include "qlorapp/ops/rope.hpp"
#include "qlorapp/ops/swiglu.hpp"

namespace qlorapp {
namespace {

/// Columns [begin, begin + width) of a (M, N) buffer.
at::Tensor columns(const at::Tensor& buffer, int64_t begin, int64_t width) { return buffer.narrow(1, begin, width); }

/// (M, heads·d) columns of a packed buffer as (M, heads, d), without a copy.
at::Tensor as_heads(const at::Tensor& buffer, int64_t begin, int64_t heads, int64_t head_dim) {
  return columns(buffer, begin, heads * head_dim).unflatten(1, {heads, head_dim});
}

double attention_scale(const DecoderBlock::Shape& shape) { return 1.0 / std::sqrt(static_cast<double>(shape.head_dim)); }

}  // namespace

DecoderBlock::DecoderBlock(const Shape& shape, Weights weights, int64_t index)
    : shape_(shape), weights_(std::move(weights)), index_(index) {
  const std::array<std::pair<int64_t, int64_t>, kProjectionCount> expected{{{shape.attention_width(), shape.hidden},
                                                                            {shape.kv_heads * shape.head_dim, shape.hidden},
                                                                            {shape.kv_heads * shape.head_dim, shape.hidden},
                                                                            {shape.hidden, shape.attention_width()},
                                                                            {shape.intermediate, shape.hidden},
                                                                            {shape.intermediate, shape.hidden},
                                                                            {shape.hidden, shape.intermediate}}};
  for (size_t i = 0; i < kProjectionCount; ++i) {
    const FrozenWeight& weight = weights_.projections[i];
    QLORAPP_CHECK_VALUE(weight.out_features() == expected[i].first && weight.in_features() == expected[i].second,
                        "[decoder_block] projection ", i, " of block ", index, " must be (", expected[i].first, ", ",
                        expected[i].second, "); got (", weight.out_features(), ", ", weight.in_features(), ").");
  }
}

const LoraAdapter* DecoderBlock::adapter(Projection projection) const {
  const auto& found = adapters_[qlorapp::index(projection)];
  return found ? &*found : nullptr;
}

std::optional<DropoutKey> DecoderBlock::dropout(Projection projection, const StepContext& context) const {
  if (!context.training) return std::nullopt;
  return context.dropout_key(static_cast<uint32_t>(index_ * 16 + static_cast<int64_t>(qlorapp::index(projection))));
}

void DecoderBlock::project(Projection projection, at::Tensor y, const at::Tensor& x, const StepContext& context,
                           Saved& saved) const {
  saved.u[qlorapp::index(projection)] = lora_projection_forward(y, x, weights_.projections[qlorapp::index(projection)],
                                                                adapter(projection), dropout(projection, context));
}

void DecoderBlock::project_back(Projection projection, at::Tensor* dx, bool accumulate, const at::Tensor& dy, const at::Tensor& x,
                                const StepContext& context, const Saved& saved, const Gradients& gradients) const {
  const size_t i = qlorapp::index(projection);
  const LoraAdapter* const own = adapter(projection);
  const auto key = dropout(projection, context);
  const at::Tensor v = lora_projection_backward_input(dx, accumulate, dy, weights_.projections[i], own, key);
  if (own) lora_projection_backward_adapter(dy, x, saved.u[i], v, *own, key, gradients[i]);
}

/// From dy to the gradient of gate|up, with the gradients of down's adapter on the way.
at::Tensor DecoderBlock::backward_down(const at::Tensor& dy, const StepContext& context, Saved& saved,
                                       const Gradients& gradients) const {
  const size_t i = qlorapp::index(Projection::kDown);
  const LoraAdapter* const own = adapter(Projection::kDown);
  const auto key = dropout(Projection::kDown, context);
  at::Tensor dh = at::empty({dy.size(0), shape_.intermediate}, dy.options());
  const at::Tensor v = lora_projection_backward_input(&dh, false, dy, weights_.projections[i], own, key);
  at::Tensor h, dgate_up;
  if (saved.gate_up.use_count() == 1) {  // nobody else will read it: one pass turns it into its gradient, and dh into h
    ops::swiglu_backward_(dh, saved.gate_up);
    h = std::move(dh);
    dgate_up = std::move(saved.gate_up);
  } else {
    dgate_up = ops::swiglu_backward(dh, saved.gate_up);
    if (own) h = ops::swiglu(saved.gate_up);
  }
  saved.gate_up.reset();
  if (own) {
    if (!saved.u[i].defined()) saved.u[i] = lora_input_product(h, *own, key);
    lora_projection_backward_adapter(dy, h, saved.u[i], v, *own, key, gradients[i]);
  }
  return dgate_up;
}

at::Tensor DecoderBlock::project_qkv(const at::Tensor& n1, const StepContext& context, Saved& saved) const {
  const int64_t d = shape_.head_dim, q = shape_.attention_width(), kv = shape_.kv_heads * d;
  at::Tensor qkv = at::empty({n1.size(0), shape_.qkv_width()}, n1.options());
  project(Projection::kQ, columns(qkv, 0, q), n1, context, saved);
  project(Projection::kK, columns(qkv, q, kv), n1, context, saved);
  project(Projection::kV, columns(qkv, q + kv, kv), n1, context, saved);
  at::Tensor turned = as_heads(qkv, 0, shape_.heads + shape_.kv_heads, d);
  ops::rope_(turned, context.cos, context.sin, context.positions);
  return qkv;
}

/// Fills what `saved` lacks, given its x (and, with attention_only, attention and lse), up to gate_up.
void DecoderBlock::compute_until_gate_up(const StepContext& context, Saved& saved) const {
  const int64_t d = shape_.head_dim, q = shape_.attention_width(), kv = shape_.kv_heads * d;
  {
    auto [n1, rstd1] = ops::rms_norm(saved.x, weights_.input_norm, shape_.rms_norm_eps);
    saved.rstd1 = std::move(rstd1);
    saved.qkv = project_qkv(n1, context, saved);
  }
  if (!saved.attention.defined()) {
    auto [out, lse] = ops::attention(as_heads(saved.qkv, 0, shape_.heads, d), as_heads(saved.qkv, q, shape_.kv_heads, d),
                                     as_heads(saved.qkv, q + kv, shape_.kv_heads, d), context.row_starts, attention_scale(shape_));
    saved.attention = out.reshape({saved.x.size(0), q});
    saved.lse = std::move(lse);
  }
  at::Tensor o = at::empty_like(saved.x);
  project(Projection::kO, o, saved.attention, context, saved);
  auto [x2, n2, rstd2] = ops::add_rms_norm(o, saved.x, weights_.post_attention_norm, shape_.rms_norm_eps);
  saved.x2 = std::move(x2);
  saved.rstd2 = std::move(rstd2);
  const int64_t width = shape_.intermediate;
  saved.gate_up = at::empty({saved.x.size(0), 2 * width}, saved.x.options());
  project(Projection::kGate, columns(saved.gate_up, 0, width), n2, context, saved);
  project(Projection::kUp, columns(saved.gate_up, width, width), n2, context, saved);
}

at::Tensor DecoderBlock::forward(const at::Tensor& x, const StepContext& context, Saved* saved, Keep keep) const {
  Saved all;
  all.x = x;
  compute_until_gate_up(context, all);
  at::Tensor y = at::empty_like(x);
  {
    const at::Tensor h = ops::swiglu(all.gate_up);
    if (saved == nullptr || keep != Keep::kEverything) all.gate_up.reset();
    project(Projection::kDown, y, h, context, all);
  }
  y.add_(all.x2);
  if (saved == nullptr) return y;
  *saved = {};
  if (keep == Keep::kEverything) {
    *saved = std::move(all);
  } else {
    saved->x = std::move(all.x);
    if (keep == Keep::kAttentionOnly) {
      saved->attention = std::move(all.attention);
      saved->lse = std::move(all.lse);
    }
  }
  return y;
}

at::Tensor DecoderBlock::backward(const at::Tensor& dy, const StepContext& context, Saved saved, const Gradients& gradients,
                                  bool need_dx) const {
  if (!saved.gate_up.defined()) compute_until_gate_up(context, saved);
  const int64_t tokens = dy.size(0), width = shape_.intermediate, d = shape_.head_dim;
  const int64_t q = shape_.attention_width(), kv = shape_.kv_heads * d;

  at::Tensor dgate_up = backward_down(dy, context, saved, gradients);
  at::Tensor dx2 = dy.clone();  // along the residual
  {
    const at::Tensor n2 = std::get<0>(ops::rms_norm(saved.x2, weights_.post_attention_norm, shape_.rms_norm_eps));
    at::Tensor dn2 = at::empty_like(dy);
    project_back(Projection::kGate, &dn2, false, columns(dgate_up, 0, width), n2, context, saved, gradients);
    project_back(Projection::kUp, &dn2, true, columns(dgate_up, width, width), n2, context, saved, gradients);
    dgate_up.reset();
    ops::rms_norm_backward_(dx2, dn2, saved.x2, weights_.post_attention_norm, saved.rstd2);
  }
  saved.x2.reset();

  at::Tensor dattention = at::empty({tokens, q}, dy.options());
  project_back(Projection::kO, &dattention, false, dx2, saved.attention, context, saved, gradients);
  at::Tensor dqkv = at::empty_like(saved.qkv);
  {
    at::Tensor dq = as_heads(dqkv, 0, shape_.heads, d), dk = as_heads(dqkv, q, shape_.kv_heads, d);
    at::Tensor dv = as_heads(dqkv, q + kv, shape_.kv_heads, d);
    ops::attention_backward_out(dattention.unflatten(1, {shape_.heads, d}), as_heads(saved.qkv, 0, shape_.heads, d),
                                as_heads(saved.qkv, q, shape_.kv_heads, d), as_heads(saved.qkv, q + kv, shape_.kv_heads, d),
                                saved.attention.unflatten(1, {shape_.heads, d}), saved.lse, context.row_starts,
                                attention_scale(shape_), dq, dk, dv);
  }
  dattention.reset();
  saved.qkv.reset();
  saved.attention.reset();
  at::Tensor turned = as_heads(dqkv, 0, shape_.heads + shape_.kv_heads, d);
  ops::rope_(turned, context.cos, context.sin, context.positions, /*inverse=*/true);

  const at::Tensor n1 = std::get<0>(ops::rms_norm(saved.x, weights_.input_norm, shape_.rms_norm_eps));
  at::Tensor dn1 = need_dx ? at::empty_like(dy) : at::Tensor();
  at::Tensor* const target = need_dx ? &dn1 : nullptr;
  project_back(Projection::kQ, target, false, columns(dqkv, 0, q), n1, context, saved, gradients);
  project_back(Projection::kK, target, true, columns(dqkv, q, kv), n1, context, saved, gradients);
  project_back(Projection::kV, target, true, columns(dqkv, q + kv, kv), n1, context, saved, gradients);
  if (!need_dx) return {};
  ops::rms_norm_backward_(dx2, dn1, saved.x, weights_.input_norm, saved.rstd1);
  return dx2;
}

at::Tensor DecoderBlock::forward_cached(const at::Tensor& x, const StepContext& context, KeyValueCache& cache) const {
  const int64_t d = shape_.head_dim, q = shape_.attention_width(), kv = shape_.kv_heads * d, tokens = x.size(0);
  QLORAPP_CHECK_VALUE(cache.length + tokens <= cache.keys.size(0), "[generate] the cache holds ", cache.keys.size(0),
                      " positions; ", cache.length + tokens, " are needed.");
  Saved scratch;
  const at::Tensor n1 = std::get<0>(ops::rms_norm(x, weights_.input_norm, shape_.rms_norm_eps));
  const at::Tensor qkv = project_qkv(n1, context, scratch);
  cache.keys.narrow(0, cache.length, tokens).copy_(as_heads(qkv, q, shape_.kv_heads, d));
  cache.values.narrow(0, cache.length, tokens).copy_(as_heads(qkv, q + kv, shape_.kv_heads, d));
  cache.length += tokens;
  const at::Tensor attended =
      ops::attention_with_cache(as_heads(qkv, 0, shape_.heads, d), cache.keys, cache.values, {0, tokens}, {0}, {cache.length},
                                attention_scale(shape_));
  at::Tensor o = at::empty_like(x);
  project(Projection::kO, o, attended.reshape({tokens, q}), context, scratch);
  auto [x2, n2, rstd2] = ops::add_rms_norm(o, x, weights_.post_attention_norm, shape_.rms_norm_eps);
  at::Tensor gate_up = at::empty({tokens, 2 * shape_.intermediate}, x.options());
  project(Projection::kGate, columns(gate_up, 0, shape_.intermediate), n2, context, scratch);
  project(Projection::kUp, columns(gate_up, shape_.intermediate, shape_.intermediate), n2, context, scratch);
  at::Tensor y = at::empty_like(x);
  project(Projection::kDown, y, ops::swiglu(gate_up), context, scratch);
  return y.add_(x2);
}

Bytes DecoderBlock::kept_bytes(const Shape& shape, int64_t tokens, Keep keep, at::ScalarType dtype,
                               std::span<const int64_t, kProjectionCount> ranks) {
  const auto element = static_cast<int64_t>(c10::elementSize(dtype));
  const Bytes input{tokens * shape.hidden * element};
  if (keep == Keep::kInputOnly) return input;
  const Bytes attention{tokens * shape.attention_width() * element + shape.heads * tokens * 4};
  if (keep == Keep::kAttentionOnly) return input + attention;
  int64_t rank_sum = 0;
  for (const int64_t rank : ranks) rank_sum += rank;
  const int64_t elements = shape.qkv_width() + shape.hidden + 2 * shape.intermediate + rank_sum;  // qkv, x2, gate|up, u
  return input + attention + Bytes{tokens * elements * element + 2 * tokens * 4};                  // and two rstd
}

Bytes DecoderBlock::kept_bytes(int64_t tokens, Keep keep, at::ScalarType dtype) const {
  std::array<int64_t, kProjectionCount> ranks{};
  for (size_t i = 0; i < kProjectionCount; ++i) ranks[i] = adapters_[i] ? adapters_[i]->a.size(0) : 0;
  return kept_bytes(shape_, tokens, keep, dtype, ranks);
}

}  // namespace qlorapp
