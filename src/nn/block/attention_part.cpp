// SPDX-License-Identifier: Apache-2.0
#include "nn/block/attention_part.hpp"

#include <cmath>
#include <utility>

#include <ATen/ATen.h>

#include "nn/block/columns.hpp"
#include "ops/attention.hpp"
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
  at::Tensor turned = as_heads(qkv, 0, shape.heads + shape.kv_heads, shape.head_dim);
  if (norms_heads()) {
    turned = ops::rms_norm_rope(turned, data_.norm(format::Site::kQuery), data_.norm(format::Site::kKey), shape.heads,
                                shape.rms_norm_eps, context.cos, context.sin, context.positions, shape.norm_rule);
  } else if (turn) {
    ops::rope_(turned, context.cos, context.sin, context.positions);
  }
  const at::Tensor v = as_heads(qkv, (shape.heads + shape.kv_heads) * shape.head_dim, shape.kv_heads, shape.head_dim);
  return {turned.narrow(1, 0, shape.heads), turned.narrow(1, shape.heads, shape.kv_heads), v};
}

double AttentionPart::scale() const { return 1.0 / std::sqrt(static_cast<double>(data_.shape.head_dim)); }

PartSaved AttentionPart::attention_of(PartSaved saved) const {
  PartSaved kept;
  prepare(kept);
  for (const size_t i : {kAttended, kLse}) kept.tensors[i] = std::move(saved.tensors[i]);
  return kept;
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
  if (!is_kept || !norms_heads()) {                                  // normed heads are formed again by backward
    const Heads heads = heads_of(qkv, /*turn=*/true, context);
    if (call.cache != nullptr) {
      const auto& [rows, entries] = *call.cache;
      entries.keys.index_copy_(0, rows.slots, heads.k);
      entries.values.index_copy_(0, rows.slots, heads.v);
      attended = ops::attention_with_cache(heads.q, entries.keys, entries.values, context.row_starts, rows.starts, rows.lengths,
                                           scale(), shape.layer.window)
                     .reshape({tokens, q});
    } else if (!is_kept) {
      auto [out, lse] =
          ops::attention(heads.q, heads.k, heads.v, context.row_starts, scale(), context.deterministic, shape.layer.window);
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
                                context.row_starts, scale(), context.deterministic, shape.layer.window);
    heads = {};
    dattended.reset();
    if (!norms_heads()) qkv.reset();
    attended.reset();
    pending.dy = wide(tokens, shape.qkv_width(), input_spare(context), options);
    at::Tensor packed = pending.dy.values();
    if (norms_heads()) {
      ops::rms_norm_rope_backward_qkv_(packed, dq, dk, dv, as_heads(qkv, 0, shape.heads + shape.kv_heads, shape.head_dim),
                                       data_.norm(format::Site::kQuery), data_.norm(format::Site::kKey), shape.rms_norm_eps,
                                       context.cos, context.sin, context.positions, shape.norm_rule);
      qkv.reset();
    } else {
      ops::rope_backward_qkv_(packed, dq, dk, dv, context.cos, context.sin, context.positions);
    }
  }
  if (call.prefetch) context.offload->prefetch(data_.index - 1);
  dn = at::empty({tokens, shape.hidden}, options);
  pending.v = input().project_back(call.need_dn ? &dn : nullptr, pending.dy, context, workspace(format::Group::kQkv));
  workspace(format::Group::kQkv).reset();
  return pending;
}

}  // namespace qlorapp
