// SPDX-License-Identifier: Apache-2.0
#include "nn/block/attention_part.hpp"

#include <utility>

#include <ATen/ATen.h>

#include "nn/views.hpp"
#include "ops/attention.hpp"
#include "ops/norm.hpp"
#include "ops/rope.hpp"

namespace qlorapp {
namespace {

/// (M, heads·d) columns of a packed buffer as (M, heads, d), without a copy.
at::Tensor as_heads(const at::Tensor& buffer, int64_t begin, int64_t heads, int64_t head_dim) {
  return columns(buffer, begin, heads * head_dim).unflatten(1, {heads, head_dim});
}

}  // namespace

AttentionPart::AttentionPart(const BlockData& data) : BlockPart(data, {format::Group::kQkv, format::Group::kO}), data_(data) {}

AttentionPart::Heads AttentionPart::heads_of(const at::Tensor& qkv, bool turn, const StepContext& context) const {
  const BlockShape& shape = data_.shape;
  const int64_t tokens = qkv.size(0), q = shape.attention_width(), k = shape.kv_heads * shape.head_dim;
  const at::Tensor v = as_heads(qkv, q + k, shape.kv_heads, shape.head_dim);
  const at::Tensor q_weight = data_.norm(format::Site::kQuery), k_weight = data_.norm(format::Site::kKey);
  const Rotation &own = rotation(context), &still = context.rotations.back();
  at::Tensor both = as_heads(qkv, 0, shape.heads + shape.kv_heads, shape.head_dim);
  Heads heads;
  const auto turn_all = [&] { ops::rope_(both, own.cos, own.sin, context.positions, /*inverse=*/false, shape.interleaved); };
  const auto norm_each = [&](const Rotation& by) {
    return ops::rms_norm_rope(both, q_weight, k_weight, shape.heads, shape.rms_norm_eps, by.cos, by.sin, context.positions,
                              shape.norm_rule);
  };
  if (norms_whole()) {
    const at::Tensor normed = at::empty({tokens, q + k}, qkv.options());
    const auto statistic = [&] {
      return at::empty({tokens}, qkv.options().dtype(qkv.scalar_type() == at::kDouble ? at::kDouble : at::kFloat));
    };
    heads.q_rstd = statistic(), heads.k_rstd = statistic();
    at::Tensor normed_q = columns(normed, 0, q), normed_k = columns(normed, q, k);
    ops::rms_norm_out(columns(qkv, 0, q), q_weight, shape.rms_norm_eps, normed_q, heads.q_rstd, shape.norm_rule);
    ops::rms_norm_out(columns(qkv, q, k), k_weight, shape.rms_norm_eps, normed_k, heads.k_rstd, shape.norm_rule);
    both = normed.unflatten(1, {shape.heads + shape.kv_heads, shape.head_dim});
    turn_all();
  } else if (norms() && !shape.turns_before_norm) {
    both = norm_each(own);
  } else {
    if (turn) turn_all();
    if (norms()) both = norm_each(still);
  }
  heads.q = both.narrow(1, 0, shape.heads), heads.k = both.narrow(1, shape.heads, shape.kv_heads), heads.v = v;
  if (own.query_scale.defined() && (turn || norms())) heads.q.mul_(query_scale(own, context, qkv.scalar_type()));
  return heads;
}

at::Tensor AttentionPart::query_scale(const Rotation& rotation, const StepContext& context, at::ScalarType dtype) {
  const at::Tensor& of = rotation.query_scale;  // a plan's has no values, and index_select no Meta kernel in C++
  const at::Tensor here = of.is_meta() ? at::empty(context.positions.sizes(), of.options()) : of.index_select(0, context.positions);
  return here.to(dtype).view({-1, 1, 1});
}

void AttentionPart::heads_back(const at::Tensor& packed, const at::Tensor& dq, const at::Tensor& dk, const at::Tensor& dv,
                               const at::Tensor& qkv, const Heads& heads, const StepContext& context) const {
  const BlockShape& shape = data_.shape;
  const int64_t q = shape.attention_width(), k = shape.kv_heads * shape.head_dim;
  const at::Tensor q_weight = data_.norm(format::Site::kQuery), k_weight = data_.norm(format::Site::kKey);
  const Rotation &own = rotation(context), &still = context.rotations.back();
  at::Tensor all = packed;
  if (own.query_scale.defined()) dq.mul_(query_scale(own, context, dq.scalar_type()));
  const auto norm_each_back = [&](const Rotation& by) {
    ops::rms_norm_rope_backward_qkv_(all, dq, dk, dv, as_heads(qkv, 0, shape.heads + shape.kv_heads, shape.head_dim), q_weight,
                                     k_weight, shape.rms_norm_eps, by.cos, by.sin, context.positions, shape.norm_rule);
  };
  if (norms() && shape.turns_before_norm) {
    norm_each_back(still);
    at::Tensor both = as_heads(packed, 0, shape.heads + shape.kv_heads, shape.head_dim);
    return ops::rope_(both, own.cos, own.sin, context.positions, /*inverse=*/true, shape.interleaved);
  }
  if (norms() && !norms_whole()) return norm_each_back(own);
  ops::rope_backward_qkv_(all, dq, dk, dv, own.cos, own.sin, context.positions, shape.interleaved);
  if (!norms_whole()) return;
  const auto norm_back = [&](int64_t begin, int64_t width, const at::Tensor& weight, const at::Tensor& rstd) {
    const at::Tensor gradient = columns(packed, begin, width);
    gradient.copy_(ops::rms_norm_backward(gradient, columns(qkv, begin, width), weight, rstd, shape.norm_rule));
  };
  norm_back(0, q, q_weight, heads.q_rstd);
  norm_back(q, k, k_weight, heads.k_rstd);
}

PartSaved AttentionPart::attention_of(PartSaved saved) const {
  PartSaved kept;
  prepare(kept);
  for (const size_t i : {kAttended, kLse}) kept.tensors[i] = std::move(saved.tensors[i]);
  return kept;
}

at::Tensor AttentionPart::cached_attention(const Heads& heads, const CacheRows& rows, const KeyValueCache& entries,
                                           const StepContext& context) const {
  const int64_t window = data_.shape.layer.window;
  if (rows.on_device.defined()) {
    const auto list = [&](int64_t i) { return rows.on_device.select(0, i); };
    return ops::decode_attention(heads.q, entries.keys, entries.values, list(0), list(1), rows.capacity, data_.shape.score_scale(),
                                 window, list(2), list(3));
  }
  if (rows.all_new)
    return std::get<0>(
        ops::attention(heads.q, heads.k, heads.v, context.row_starts, data_.shape.score_scale(), context.deterministic, window));
  return ops::attention_with_cache(heads.q, entries.keys, entries.values, context.row_starts, rows.starts, rows.lengths,
                                   data_.shape.score_scale(), window, rows.shared_starts, rows.shared_lengths);
}

at::Tensor AttentionPart::forward(Wide n, const Call& call, at::Tensor into) const {
  const BlockShape& shape = data_.shape;
  const StepContext& context = call.context;
  const bool keeps = call.pass != Pass::kForward;
  const auto u_of = [&](const ProjectionGroup& group) { return keeps ? of(group, call.saved) : std::span<at::Tensor>(); };
  const auto workspace = [&](format::Group group) {
    return call.workspaces != nullptr ? &(*call.workspaces)[static_cast<size_t>(group)] : nullptr;
  };
  const int64_t tokens = n.buffer.size(0), q = shape.attention_width();
  const at::TensorOptions options = n.buffer.options();
  at::Tensor qkv = at::empty({tokens, shape.qkv_width()}, options);
  input().project(qkv, n, context, u_of(input()), workspace(format::Group::kQkv));
  n = {};
  at::Tensor& attended = call.saved.tensors[kAttended];
  const bool is_kept = call.cache == nullptr && attended.defined();  // by Keep::kAttentionOnly
  if (!is_kept || turns_in_place()) {                                // other heads are formed again by backward
    const Heads heads = heads_of(qkv, /*turn=*/true, context);
    if (call.cache != nullptr) {
      const auto& [rows, entries] = *call.cache;
      entries.keys.index_copy_(0, rows.slots, heads.k);
      entries.values.index_copy_(0, rows.slots, heads.v);
      attended = cached_attention(heads, rows, entries, context).reshape({tokens, q});
    } else if (!is_kept) {
      auto [out, lse] = ops::attention(heads.q, heads.k, heads.v, context.row_starts, data_.shape.score_scale(),
                                       context.deterministic, shape.layer.window);
      attended = out.reshape({tokens, q});
      call.saved.tensors[kLse] = std::move(lse);
    }
  }
  if (keeps) call.saved.tensors[kQkv] = std::move(qkv);
  qkv.reset();
  if (!into.defined()) into = at::empty({tokens, shape.hidden}, options);
  output().project(into, {attended, q}, context, u_of(output()), workspace(format::Group::kO));
  return into;
}

BlockPart::Pending AttentionPart::backward(const Wide& dy, at::Tensor& dn, const BackwardCall& call) const {
  const BlockShape& shape = data_.shape;
  const StepContext& context = call.context;
  const int64_t tokens = dy.buffer.size(0), q = shape.attention_width();
  const at::TensorOptions options = dy.buffer.options();
  at::Tensor &qkv = call.saved.tensors[kQkv], &attended = call.saved.tensors[kAttended];
  const auto workspace = [&](format::Group group) -> at::Tensor& { return call.workspaces[static_cast<size_t>(group)]; };

  at::Tensor dattended = at::empty({tokens, q}, options);
  const ProjectionGroup::Inner v_of_o = output().project_back(&dattended, dy, context, workspace(format::Group::kO));
  workspace(format::Group::kO).reset();
  output().add_gradients(dy, attended, v_of_o, context, of(output(), std::as_const(call.saved)), call.gradients);
  Pending pending;
  {
    Heads heads = heads_of(qkv, /*turn=*/false, context);
    const auto by_head = [&](const at::Tensor& x) { return x.unflatten(1, {shape.heads, shape.head_dim}); };
    const auto [dq, dk, dv] =
        ops::attention_backward(by_head(dattended), heads.q, heads.k, heads.v, by_head(attended), call.saved.tensors[kLse],
                                context.row_starts, data_.shape.score_scale(), context.deterministic, shape.layer.window);
    heads.q.reset(), heads.k.reset(), heads.v.reset();
    dattended.reset();
    if (!norms()) qkv.reset();
    attended.reset();
    pending.dy = wide(tokens, shape.qkv_width(), input_spare(context), options);
    heads_back(pending.dy.values(), dq, dk, dv, qkv, heads, context);
    qkv.reset();
  }
  if (call.prefetch) context.offload->prefetch(data_.index - 1);
  dn = at::empty({tokens, shape.hidden}, options);
  pending.v = input().project_back(call.need_dn ? &dn : nullptr, pending.dy, context, workspace(format::Group::kQkv));
  workspace(format::Group::kQkv).reset();
  return pending;
}

}  // namespace qlorapp
