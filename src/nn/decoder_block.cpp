// SPDX-License-Identifier: Apache-2.0
#include "nn/decoder_block.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "adapters/lora_projection.hpp"
#include "columns.hpp"
#include "core/check.hpp"
#include "nn/float8_stack.hpp"
#include "nn/saved.hpp"
#include "nn/step_context.hpp"
#include "ops/attention.hpp"
#include "ops/norm.hpp"
#include "ops/rope.hpp"
#include "ops/swiglu.hpp"

namespace qlorapp {
namespace {

/// (M, heads·d) columns of a packed buffer as (M, heads, d), without a copy.
at::Tensor as_heads(const at::Tensor& buffer, int64_t begin, int64_t heads, int64_t head_dim) {
  return columns(buffer, begin, heads * head_dim).unflatten(1, {heads, head_dim});
}

/// Whether this is the only owner of `tensor` and of its memory.
bool is_ours_alone(const at::Tensor& tensor) { return tensor.use_count() == 1 && tensor.storage().use_count() == 1; }

/// An uninitialized matrix like `like`, in rows with room for the low-rank products behind them.
Wide wide(int64_t tokens, int64_t width, int64_t spare, const at::Tensor& like) {
  return {at::empty({tokens, width + spare}, like.options()), width};
}

at::TensorOptions statistic_options(const at::Tensor& x) {
  return x.options().dtype(x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
}

double attention_scale(const DecoderBlock::Shape& shape) { return 1.0 / std::sqrt(static_cast<double>(shape.head_dim)); }

}  // namespace

DecoderBlock::DecoderBlock(const Shape& shape, Weights weights, int64_t index)
    : shape_(shape), weights_(std::move(weights)), adapters_(weights_.projections.size()), index_(index) {}

/// From dy to the gradient of gate|up, with the gradients of down's adapter on the way.
Wide DecoderBlock::backward_down(const Wide& dy, const StepContext& context, Saved& saved, const Gradients& gradients,
                                 at::Tensor* cache) const {
  const size_t i = qlorapp::index(Projection::kDown);
  const int64_t width = shape_.intermediate;
  const LoraAdapter* const own = adapter(Projection::kDown);
  at::Tensor dh = at::empty({dy.buffer.size(0), width}, dy.buffer.options()), workspace;
  const bool eight_bits = stacked(context) && context.float8;
  if (stacked(context) && !eight_bits) {
    workspace = cache != nullptr && cache->defined() ? *cache : stack(kDown, context).workspace(dh.scalar_type());
    if (cache != nullptr) *cache = workspace;
  }
  const Inner v = project_back(kDown, &dh, dy, context, workspace);
  at::Tensor h;
  Wide dgate_up{saved.gate_up, 2 * width};
  if (saved.gate_up.use_count() == 2) {  // its last reader: one pass turns it into its gradient, and dh into h
    at::Tensor values = dgate_up.values();
    ops::swiglu_backward_(dh, values);
    h = std::move(dh);
  } else {
    const at::Tensor kept = dgate_up.values();
    dgate_up.buffer = at::empty_like(saved.gate_up);
    dgate_up.values().copy_(ops::swiglu_backward(dh, kept));
    if (own) h = ops::swiglu(kept);
  }
  saved.gate_up.reset();
  if (own) {
    if (!saved.u[i].defined()) {
      saved.u[i] = eight_bits            ? float8_stack(kDown, context).input_product(h)
                   : workspace.defined() ? stack(kDown, context).input_product(h, workspace)
                                         : lora_input_product(h, *own, dropout(Projection::kDown, context));
    }
    add_gradients(kDown, dy, h, v, context, saved, gradients);
  }
  return dgate_up;
}

at::Tensor DecoderBlock::project_qkv(const Wide& n1, const StepContext& context, Saved* saved, at::Tensor* cache) const {
  at::Tensor qkv = at::empty({n1.buffer.size(0), shape_.qkv_width()}, n1.buffer.options());
  project(kQkv, qkv, n1, context, saved, cache);
  at::Tensor turned = as_heads(qkv, 0, shape_.heads + shape_.kv_heads, shape_.head_dim);
  ops::rope_(turned, context.cos, context.sin, context.positions);
  return qkv;
}

/// Fills what `saved` lacks, given its x (and, with attention_only, attention and lse), up to attention. @returns x2 - x.
at::Tensor DecoderBlock::attend(const StepContext& context, Saved& saved, bool for_backward, Workspaces* cache) const {
  Saved* const low_rank = for_backward ? &saved : nullptr;
  const int64_t tokens = saved.x.size(0), d = shape_.head_dim, q = shape_.attention_width(), kv = shape_.kv_heads * d;
  {
    Wide n1 = wide(tokens, shape_.hidden, spare(context, {kQkv}), saved.x);
    saved.rstd1 = at::empty({tokens}, statistic_options(saved.x));
    at::Tensor values = n1.values();
    ops::rms_norm_out(saved.x, weights_.norms[kInputNorm], shape_.rms_norm_eps, values, saved.rstd1);
    saved.qkv = project_qkv(n1, context, low_rank, cache ? &cache->qkv : nullptr);
  }
  if (!saved.attention.defined()) {
    auto [out, lse] = ops::attention(as_heads(saved.qkv, 0, shape_.heads, d), as_heads(saved.qkv, q, shape_.kv_heads, d),
                                     as_heads(saved.qkv, q + kv, shape_.kv_heads, d), context.row_starts, attention_scale(shape_),
                                     context.deterministic);
    saved.attention = out.reshape({tokens, q});
    saved.lse = std::move(lse);
    if (!for_backward) saved.qkv.reset();
  }
  at::Tensor o = at::empty_like(saved.x);
  project(kO, o, {saved.attention, q}, context, low_rank, cache ? &cache->o : nullptr);
  return o;
}

void DecoderBlock::compute_gate_up(const Wide& n2, const StepContext& context, Saved& saved, bool for_backward,
                                   Workspaces* cache) const {
  const Wide gate_up = wide(n2.buffer.size(0), 2 * shape_.intermediate, spare(context, {kGateUp}), n2.buffer);
  project(kGateUp, gate_up.values(), n2, context, for_backward ? &saved : nullptr, cache ? &cache->gate_up : nullptr);
  saved.gate_up = gate_up.buffer;
}

/// Fills what `saved` lacks, given its x (and, with attention_only, attention and lse), up to gate_up.
void DecoderBlock::compute_until_gate_up(const StepContext& context, Saved& saved, bool for_backward, Workspaces* cache) const {
  const at::Tensor o = attend(context, saved, for_backward, cache);
  saved.x2 = at::empty_like(saved.x);
  saved.rstd2 = at::empty_like(saved.rstd1);
  const Wide n2 = wide(o.size(0), shape_.hidden, spare(context, {kGateUp}), saved.x);
  at::Tensor values = n2.values();
  ops::add_rms_norm_out(o, saved.x, weights_.norms[kPostAttentionNorm], shape_.rms_norm_eps, saved.x2, values, saved.rstd2);
  compute_gate_up(n2, context, saved, for_backward, cache);
}

at::Tensor DecoderBlock::forward(const at::Tensor& x, const StepContext& context, Saved* saved, Keep keep) const {
  std::optional<InputOffload::Copy> to_host;  // beside the computation; when it ends, the stream waits for it
  if (saved != nullptr && keep == Keep::kInputOnHost && context.offload) to_host.emplace(*context.offload, x, index_);
  const bool keep_all = saved != nullptr && keep == Keep::kEverything;
  Saved all;
  all.u.resize(adapters_.size());
  all.x = x;
  at::Tensor y;
  if (!keep_all && tiled(context, x.size(0))) {
    y = mlp_in_tiles(attend(context, all, keep_all, nullptr).add_(x), context);
  } else {
    compute_until_gate_up(context, all, keep_all);
    y = at::empty_like(x);
    const Wide h = wide(x.size(0), shape_.intermediate, spare(context, {kDown}), x);
    at::Tensor values = h.values();
    ops::swiglu_out(columns(all.gate_up, 0, 2 * shape_.intermediate), values);
    if (!keep_all) all.gate_up.reset();
    project(kDown, y, h, context, keep_all ? &all : nullptr);
    y.add_(all.x2);
  }
  if (saved == nullptr) return y;
  *saved = {};
  if (keep_all) {
    *saved = std::move(all);
  } else {
    saved->x = to_host ? to_host->host() : std::move(all.x);
    saved->x_on_host = to_host.has_value();
    if (keep == Keep::kAttentionOnly) {
      saved->attention = std::move(all.attention);
      saved->lse = std::move(all.lse);
    }
  }
  return y;
}

/// From the gradient of the output to that of x2, both in `residual`. Reads saved.x2, rstd2 and gate_up.
void DecoderBlock::backward_mlp(const Wide& residual, const StepContext& context, Saved& saved, const Gradients& gradients,
                                Workspaces& workspaces, bool keep_workspaces) const {
  const Wide dgate_up = backward_down(residual, context, saved, gradients, keep_workspaces ? &workspaces.down : nullptr);
  at::Tensor dn2 = at::empty({residual.buffer.size(0), shape_.hidden}, residual.buffer.options()), dresidual = residual.values();
  const Inner v = project_back(kGateUp, &dn2, dgate_up, context, workspaces.gate_up);
  if (!keep_workspaces) workspaces.gate_up.reset();
  ops::rms_norm_backward_(dresidual, dn2, saved.x2, weights_.norms[kPostAttentionNorm], saved.rstd2);
  const at::Tensor& n2 = dn2;
  add_gradients(kGateUp, dgate_up, n2, v, context, saved, gradients);
}

bool DecoderBlock::tiled(const StepContext& context, int64_t tokens) {
  return context.memory.mlp_tile_rows > 0 && context.memory.mlp_tile_rows < tokens;
}

/// use(context, first row, rows) for one tile after the other.
template <class Use>
void DecoderBlock::for_each_tile(const StepContext& context, int64_t tokens, Use&& use) {
  StepContext tile = context;
  for (int64_t begin = 0; begin < tokens; begin += context.memory.mlp_tile_rows) {
    tile.first_row = context.first_row + begin;
    use(tile, begin, std::min(context.memory.mlp_tile_rows, tokens - begin));
  }
}

/// A tile's MLP up to gate|up, from its rows of x2.
Saved DecoderBlock::compute_tile(const at::Tensor& x2, const StepContext& context, bool for_backward, Workspaces* cache) const {
  Saved tile;
  tile.u.resize(adapters_.size());
  tile.x2 = x2;
  tile.rstd2 = at::empty({x2.size(0)}, statistic_options(x2));
  const Wide n2 = wide(x2.size(0), shape_.hidden, spare(context, {kGateUp}), x2);
  at::Tensor values = n2.values();
  ops::rms_norm_out(x2, weights_.norms[kPostAttentionNorm], shape_.rms_norm_eps, values, tile.rstd2);
  compute_gate_up(n2, context, tile, for_backward, cache);
  return tile;
}

/// The block's output from x2, when nothing of the MLP is kept.
at::Tensor DecoderBlock::mlp_in_tiles(const at::Tensor& x2, const StepContext& context) const {
  at::Tensor y = at::empty_like(x2);
  Workspaces workspaces;
  Workspaces* const cache = keeps_workspaces(context) ? &workspaces : nullptr;
  for_each_tile(context, x2.size(0), [&](const StepContext& own, int64_t begin, int64_t rows) {
    Saved tile = compute_tile(x2.narrow(0, begin, rows), own, /*for_backward=*/false, cache);
    const Wide h = wide(rows, shape_.intermediate, spare(own, {kDown}), x2);
    at::Tensor values = h.values();
    ops::swiglu_out(columns(tile.gate_up, 0, 2 * shape_.intermediate), values);
    tile.gate_up.reset();
    at::Tensor part = y.narrow(0, begin, rows);
    project(kDown, part, h, own, nullptr, cache ? &cache->down : nullptr);
    part.add_(tile.x2);
  });
  return y;
}

Wide DecoderBlock::backward(Wide dy, const StepContext& context, Saved saved, const Gradients& gradients, bool need_dx) const {
  saved.u.resize(adapters_.size());
  // Asked of the tensor, not of x_on_host: hooks on saved tensors may have moved it.
  if (context.offload && saved.x.device() != dy.buffer.device()) saved.x = context.offload->load(saved.x, index_);
  const bool in_tiles = !saved.gate_up.defined() && tiled(context, dy.buffer.size(0));
  Workspaces workspaces;
  Workspaces* const cache = keeps_workspaces(context) ? &workspaces : nullptr;
  if (in_tiles) saved.x2 = attend(context, saved, /*for_backward=*/true, cache).add_(saved.x);
  else if (!saved.gate_up.defined()) compute_until_gate_up(context, saved, /*for_backward=*/true, cache);
  const int64_t tokens = dy.buffer.size(0), d = shape_.head_dim, q = shape_.attention_width(), kv = shape_.kv_heads * d;
  const at::TensorOptions options = dy.buffer.options();

  // The gradient along the residual: of the block's output first, then of x2, at last of x.
  if (const int64_t columns_behind = spare(context, {kO, kDown}); !is_ours_alone(dy.buffer) || dy.spare() < columns_behind) {
    Wide copy = wide(tokens, shape_.hidden, columns_behind, dy.buffer);
    copy.values().copy_(dy.values());
    dy = std::move(copy);
  }
  at::Tensor dresidual = dy.values();
  if (in_tiles) {
    for_each_tile(context, tokens, [&](const StepContext& own, int64_t begin, int64_t rows) {
      Saved tile = compute_tile(saved.x2.narrow(0, begin, rows), own, /*for_backward=*/true, cache);
      backward_mlp({dy.buffer.narrow(0, begin, rows), dy.width}, own, tile, gradients, workspaces, cache != nullptr);
    });
    workspaces.gate_up.reset();
    workspaces.down.reset();
  } else {
    backward_mlp(dy, context, saved, gradients, workspaces, /*keep_workspaces=*/false);
  }
  saved.x2.reset();
  // The next input is on its way when the widest tensors are gone: those of the MLP, or in tiles those of attention.
  if (context.offload && !in_tiles) context.offload->prefetch(index_ - 1);

  at::Tensor dattention = at::empty({tokens, q}, options);
  const Inner v_of_o = project_back(kO, &dattention, dy, context, workspaces.o);
  workspaces.o.reset();
  add_gradients(kO, dy, saved.attention, v_of_o, context, saved, gradients);
  Wide dqkv;
  {
    const auto [dq, dk, dv] =
        ops::attention_backward(dattention.unflatten(1, {shape_.heads, d}), as_heads(saved.qkv, 0, shape_.heads, d),
                                as_heads(saved.qkv, q, shape_.kv_heads, d), as_heads(saved.qkv, q + kv, shape_.kv_heads, d),
                                saved.attention.unflatten(1, {shape_.heads, d}), saved.lse, context.row_starts,
                                attention_scale(shape_), context.deterministic);
    dattention.reset();
    saved.qkv.reset();
    saved.attention.reset();
    dqkv = wide(tokens, shape_.qkv_width(), spare(context, {kQkv}), dy.buffer);
    at::Tensor packed = dqkv.values();
    ops::rope_backward_qkv_(packed, dq, dk, dv, context.cos, context.sin, context.positions);
  }
  if (context.offload && in_tiles) context.offload->prefetch(index_ - 1);

  at::Tensor dn1 = at::empty({tokens, shape_.hidden}, options);
  const Inner v = project_back(kQkv, need_dx ? &dn1 : nullptr, dqkv, context, workspaces.qkv);
  workspaces.qkv.reset();
  if (need_dx) {
    ops::rms_norm_backward_(dresidual, dn1, saved.x, weights_.norms[kInputNorm], saved.rstd1);
  } else {
    at::Tensor rstd = at::empty_like(saved.rstd1);  // the one that was saved may be an autograd graph's
    ops::rms_norm_out(saved.x, weights_.norms[kInputNorm], shape_.rms_norm_eps, dn1, rstd);
  }
  const at::Tensor& n1 = dn1;  // either way
  add_gradients(kQkv, dqkv, n1, v, context, saved, gradients);
  return need_dx ? std::move(dy) : Wide{};
}

at::Tensor DecoderBlock::forward_cached(const at::Tensor& x, const StepContext& context, const CacheRows& rows,
                                        KeyValueCache& cache) const {
  const int64_t d = shape_.head_dim, q = shape_.attention_width(), kv = shape_.kv_heads * d, tokens = x.size(0);
  const at::Tensor n1 = std::get<0>(ops::rms_norm(x, weights_.norms[kInputNorm], shape_.rms_norm_eps));
  const at::Tensor qkv = project_qkv({n1, shape_.hidden}, context, nullptr);
  cache.keys.index_copy_(0, rows.slots, as_heads(qkv, q, shape_.kv_heads, d));
  cache.values.index_copy_(0, rows.slots, as_heads(qkv, q + kv, shape_.kv_heads, d));
  const at::Tensor attended = ops::attention_with_cache(as_heads(qkv, 0, shape_.heads, d), cache.keys, cache.values,
                                                        context.row_starts, rows.starts, rows.lengths, attention_scale(shape_));
  at::Tensor o = at::empty_like(x);
  project(kO, o, {attended.reshape({tokens, q}), q}, context, nullptr);
  auto [x2, n2, rstd2] = ops::add_rms_norm(o, x, weights_.norms[kPostAttentionNorm], shape_.rms_norm_eps);
  at::Tensor gate_up = at::empty({tokens, 2 * shape_.intermediate}, x.options());
  project(kGateUp, gate_up, {n2, shape_.hidden}, context, nullptr);
  at::Tensor y = at::empty_like(x);
  project(kDown, y, {ops::swiglu(gate_up), shape_.intermediate}, context, nullptr);
  return y.add_(x2);
}

Bytes DecoderBlock::kept_bytes(const Shape& shape, int64_t tokens, Keep keep, at::ScalarType dtype, std::span<const int64_t> ranks,
                               bool stacked) {
  const auto element = static_cast<int64_t>(c10::elementSize(dtype));
  const Bytes input{tokens * shape.hidden * element};
  if (keep == Keep::kInputOnly) return input;
  if (keep == Keep::kInputOnHost) return {};
  const Bytes attention{tokens * shape.attention_width() * element + shape.heads * tokens * 4};
  if (keep == Keep::kAttentionOnly) return input + attention;
  int64_t rank_sum = 0;
  for (const int64_t rank : ranks) rank_sum += rank;
  const int64_t o_rank = ranks[qlorapp::index(Projection::kO)];
  if (stacked) rank_sum += ProjectionStack::padded(o_rank) - o_rank;  // as its product wrote it
  const int64_t gate_up_rank = ranks[qlorapp::index(Projection::kGate)] + ranks[qlorapp::index(Projection::kUp)];
  const int64_t spare = stacked ? ProjectionStack::padded(gate_up_rank) : 0;
  const int64_t elements = shape.qkv_width() + shape.hidden + 2 * shape.intermediate + spare + rank_sum;  // qkv, x2, gate|up, u
  return input + attention + Bytes{tokens * elements * element + 2 * tokens * 4};                         // and two rstd
}

Bytes DecoderBlock::kept_bytes(int64_t tokens, Keep keep, at::ScalarType dtype, bool stacked) const {
  std::vector<int64_t> ranks;
  for (const auto& adapter : adapters_) ranks.push_back(adapter ? adapter->a.size(0) : 0);
  return kept_bytes(shape_, tokens, keep, dtype, ranks, stacked);
}

}  // namespace qlorapp
