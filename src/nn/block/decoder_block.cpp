// SPDX-License-Identifier: Apache-2.0
#include "nn/block/decoder_block.hpp"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <utility>

#include "core/check.hpp"
#include "nn/block/gated_mlp_part.hpp"
#include "nn/float8_stack.hpp"
#include "ops/device_memory.hpp"
#include "ops/norm.hpp"
#include "qlorapp/format/model_layout.hpp"

namespace qlorapp {
namespace {

using format::Site;

/// Whether this is the only owner of `tensor` and of its memory.
bool is_ours_alone(const at::Tensor& tensor) { return tensor.use_count() == 1 && tensor.storage().use_count() == 1; }

at::TensorOptions statistic_options(const at::Tensor& x) {
  return x.options().dtype(x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
}

/// Whether a dequantized weight waits for its next use in the block.
bool keeps_workspaces(const StepContext& context) { return context.memory.weight_workspace == WeightWorkspace::kLayer; }

}  // namespace

DecoderBlock::DecoderBlock(const Shape& shape, Weights weights, int64_t index)
    : data_(std::make_unique<BlockData>(shape, std::move(weights), index)),
      attention_(std::make_unique<AttentionPart>(*data_)),
      mlp_(std::make_unique<GatedMlpPart>(*data_)) {}

/// Of the norms of the stream, which is stored times a scale: their results are those of the stream itself.
double DecoderBlock::stream_eps() const { return shape().rms_norm_eps * shape().stream_scale * shape().stream_scale; }

DecoderBlock::Branch DecoderBlock::attention() const { return {*attention_, Site::kBeforeAttention, Site::kAfterAttention}; }
DecoderBlock::Branch DecoderBlock::mlp() const { return {*mlp_, Site::kBeforeMlp, Site::kAfterMlp}; }

void DecoderBlock::set_float8(const at::Tensor& ones, const BlockWeights& projections) {
  data_->float8 = {};
  if (!ones.defined()) return;
  std::array<std::vector<FrozenWeight>, format::kGroups> groups;
  for (size_t i = 0; i < projections.size(); ++i) {
    groups[static_cast<size_t>(shape().linears[i])].push_back(projections[i].to(data_->device()));
  }
  std::array<Float8Scales, format::kGroups> scales;
  for (size_t group = 0; group < groups.size(); ++group) {
    const std::string obstacle = Float8Stack::obstacle(groups[group]);
    QLORAPP_CHECK_VALUE(obstacle.empty(), "[fp8] block {} cannot be multiplied in eight bits: {}. Leave fp8 out.", index(),
                        obstacle);
    scales[group] = {Float8Stack::weight_scale(groups[group]), ones};
  }
  data_->float8 = std::move(scales);
}

void DecoderBlock::replace_projection(Projection projection, FrozenWeight weight) {
  FrozenWeight& own = data_->weights.projections[qlorapp::index(projection)];
  weights().piece.defined() ? copy_weight(own, weight) : static_cast<void>(own = std::move(weight));
  if (const at::Tensor ones = float8_ones(); ones.defined()) set_float8(ones, weights().projections);
}

DecoderBlock::Weights DecoderBlock::moved(bool to_host) const {
  const at::NoGradGuard no_grad;
  const BlockForms forms = forms_of(weights().projections);
  Weights result{weights().dense, {}};
  if (to_host) {
    result.piece = ops::empty_on_host({bytes_in_one_piece(forms)}, at::kByte, data_->device());
    result.projections = views_of(result.piece, forms);
  }
  for (size_t i = 0; i < forms.size(); ++i) {
    if (!to_host) result.projections.push_back(empty_weight(forms[i], places_on(data_->device())));
    copy_weight(result.projections[i], weights().projections[i]);
  }
  return result;
}

Saved DecoderBlock::empty_saved() const {
  Saved saved;
  attention_->prepare(saved.attention);
  mlp_->prepare(saved.mlp);
  return saved;
}

Wide DecoderBlock::normed(const Branch& branch, at::Tensor& x, const at::Tensor& residual, const StepContext& context,
                          PartSaved& saved) const {
  const at::Tensor weight = data_->norm(branch.before);
  const int64_t tokens = x.size(0), width = shape().hidden;
  if (!weight.defined()) {
    if (residual.defined()) x = x + residual;
    return {x, width};
  }
  at::Tensor sum = residual.defined() ? at::empty_like(residual) : at::Tensor();
  saved.rstd_before = at::empty({tokens}, statistic_options(x));
  Wide n = wide(tokens, width, branch.part.input_spare(context), x.options());
  at::Tensor values = n.values();
  if (!residual.defined()) {
    ops::rms_norm_out(x, weight, stream_eps(), values, saved.rstd_before, shape().norm_rule);
    return n;
  }
  ops::add_rms_norm_out(x, residual, weight, stream_eps(), sum, values, saved.rstd_before, shape().norm_rule);
  x = std::move(sum);
  return n;
}

at::Tensor DecoderBlock::through(const Branch& branch, Wide n, const BlockPart::Call& call, at::Tensor into) const {
  const at::Tensor weight = data_->norm(branch.after);
  if (!weight.defined()) {
    const double factor = shape().residual_factor * shape().stream_scale;
    at::Tensor y = branch.part.forward(std::move(n), call, std::move(into));
    return y.defined() && factor != 1 ? y.mul_(factor) : y;
  }
  const double factor = shape().residual_factor;  // the norm has the scale of the stream
  const at::Tensor y = branch.part.forward(std::move(n), call, {});
  if (!into.defined()) into = at::empty_like(y);
  at::Tensor rstd = at::empty({y.size(0)}, statistic_options(y));
  ops::rms_norm_out(y, weight, shape().rms_norm_eps, into, rstd, data_->added_rule());
  if (call.pass != Pass::kForward) {
    call.saved.output = y;
    call.saved.rstd_after = std::move(rstd);
  }
  return factor != 1 ? into.mul_(factor) : into;
}

at::Tensor DecoderBlock::forward(const at::Tensor& x, const StepContext& context, Saved* saved, Keep keep,
                                 const BlockCache* cache) const {
  const at::AutoDispatchBelowADInplaceOrView no_graph;  // views that autograd tracks cost the host twice as much
  std::optional<InputOffload::Copy> to_host;            // beside the computation; when it ends, the stream waits for it
  if (saved != nullptr && keep == Keep::kInputOnHost && context.offload) to_host.emplace(*context.offload, x, index());
  const bool keep_all = saved != nullptr && keep == Keep::kEverything;
  const Pass pass = keep_all ? Pass::kKeep : Pass::kForward;
  Saved all = empty_saved();
  all.x = x;
  at::Tensor added;
  {
    at::Tensor stream = x;
    Wide n = normed(attention(), stream, {}, context, all.attention);
    added = through(attention(), std::move(n), {.context = context, .saved = all.attention, .pass = pass, .cache = cache});
  }
  at::Tensor y;
  if (!keep_all && tiled(context, x.size(0))) {
    y = mlp_in_tiles(added.add_(x), context);
  } else {
    all.x2 = std::move(added);
    Wide n = normed(mlp(), all.x2, x, context, all.mlp);
    y = through(mlp(), std::move(n), {.context = context, .saved = all.mlp, .pass = pass});
    y.add_(all.x2);
  }
  if (saved == nullptr) return y;
  if (keep_all) {
    *saved = std::move(all);
    return y;
  }
  *saved = empty_saved();
  saved->x = to_host ? to_host->host() : std::move(all.x);
  saved->x_on_host = to_host.has_value();
  if (keep == Keep::kAttentionOnly) saved->attention = attention_->attention_of(std::move(all.attention));
  return y;
}

bool DecoderBlock::tiled(const StepContext& context, int64_t tokens) const {
  return mlp_->is_tokenwise() && context.memory.mlp_tile_rows > 0 && context.memory.mlp_tile_rows < tokens;
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

at::Tensor DecoderBlock::mlp_in_tiles(const at::Tensor& x2, const StepContext& context) const {
  at::Tensor y = at::empty_like(x2);
  Workspaces workspaces;
  for_each_tile(context, x2.size(0), [&](const StepContext& own, int64_t begin, int64_t rows) {
    PartSaved saved;
    mlp_->prepare(saved);
    at::Tensor stream = x2.narrow(0, begin, rows);
    Wide n = normed(mlp(), stream, {}, own, saved);
    at::Tensor part = y.narrow(0, begin, rows);
    const BlockPart::Call call{.context = own, .saved = saved, .workspaces = keeps_workspaces(context) ? &workspaces : nullptr};
    part = through(mlp(), std::move(n), call, part);
    part.add_(stream);
  });
  return y;
}

void DecoderBlock::back_through(const Branch& branch, const Wide& residual, const at::Tensor& x,
                                const BlockPart::BackwardCall& call) const {
  at::Tensor dresidual = residual.values(), dn;
  Wide dy = residual;
  const at::Tensor after = data_->norm(branch.after);
  const double factor = shape().residual_factor * (after.defined() ? 1 : shape().stream_scale);
  if (after.defined() || factor != 1) {
    dy = wide(x.size(0), shape().hidden, branch.part.output_spare(call.context), x.options());
    at::Tensor values = dy.values();
    if (after.defined()) {
      values.copy_(ops::rms_norm_backward(dresidual, call.saved.output, after, call.saved.rstd_after, data_->added_rule()));
      call.saved.output.reset();
    } else {
      values.copy_(dresidual);
    }
    if (factor != 1) values.mul_(factor);
  }
  const BlockPart::Pending pending = branch.part.backward(dy, dn, call);
  at::Tensor n = dn;
  if (const at::Tensor weight = data_->norm(branch.before); !weight.defined()) {
    if (call.need_dn) dresidual.add_(dn);
    n = x;
  } else if (call.need_dn) {
    ops::rms_norm_backward_(dresidual, dn, x, weight, call.saved.rstd_before, shape().norm_rule);
  } else {
    at::Tensor rstd = at::empty_like(call.saved.rstd_before);  // the one that was saved may be an autograd graph's
    ops::rms_norm_out(x, weight, stream_eps(), dn, rstd, shape().norm_rule);
  }
  branch.part.add_input_gradients(pending, n, call.context, call.saved, call.gradients);
}

Wide DecoderBlock::backward(Wide dy, const StepContext& context, Saved saved, const Gradients& gradients, bool need_dx) const {
  const at::AutoDispatchBelowADInplaceOrView no_graph;
  attention_->prepare(saved.attention);
  mlp_->prepare(saved.mlp);
  // Asked of the tensor, not of x_on_host: hooks on saved tensors may have moved it.
  if (context.offload && saved.x.device() != dy.buffer.device()) saved.x = context.offload->load(saved.x, index());
  const int64_t tokens = dy.buffer.size(0);
  const bool again = !saved.x2.defined(), in_tiles = again && tiled(context, tokens);
  const bool needs_output = data_->norm(Site::kAfterMlp).defined();
  Workspaces workspaces;
  Workspaces* const shared = keeps_workspaces(context) ? &workspaces : nullptr;
  if (again) {
    at::Tensor stream = saved.x;
    Wide n1 = normed(attention(), stream, {}, context, saved.attention);
    saved.x2 = through(attention(), std::move(n1),
                       {.context = context, .saved = saved.attention, .pass = Pass::kRecompute, .workspaces = shared});
    if (in_tiles) {
      saved.x2.add_(saved.x);
    } else {
      Wide n2 = normed(mlp(), saved.x2, saved.x, context, saved.mlp);
      const BlockPart::Call call{
          .context = context, .saved = saved.mlp, .pass = Pass::kRecompute, .workspaces = shared, .needs_output = needs_output};
      static_cast<void>(through(mlp(), std::move(n2), call));
    }
  }

  // The gradient along the residual: of the block's output first, then of x2, at last of x.
  const int64_t spare = std::max(attention_->output_spare(context), mlp_->output_spare(context));
  if (!is_ours_alone(dy.buffer) || dy.spare() < spare) {
    Wide copy = wide(tokens, shape().hidden, spare, dy.buffer.options());
    copy.values().copy_(dy.values());
    dy = std::move(copy);
  }
  if (in_tiles) {
    for_each_tile(context, tokens, [&](const StepContext& own, int64_t begin, int64_t rows) {
      PartSaved tile;
      mlp_->prepare(tile);
      at::Tensor x2 = saved.x2.narrow(0, begin, rows);
      Wide n2 = normed(mlp(), x2, {}, own, tile);
      static_cast<void>(
          through(mlp(), std::move(n2),
                  {.context = own, .saved = tile, .pass = Pass::kRecompute, .workspaces = shared, .needs_output = needs_output}));
      back_through(
          mlp(), {dy.buffer.narrow(0, begin, rows), dy.width}, x2,
          {.context = own, .saved = tile, .gradients = gradients, .workspaces = workspaces, .keep_workspaces = shared != nullptr});
    });
    for (const format::Group group : {format::Group::kGateUp, format::Group::kDown}) workspaces[static_cast<size_t>(group)].reset();
  } else {
    back_through(mlp(), dy, saved.x2, {.context = context, .saved = saved.mlp, .gradients = gradients, .workspaces = workspaces});
  }
  saved.x2.reset();
  // The next input is on its way when the widest tensors are gone: those of the MLP, or in tiles those of attention.
  if (context.offload && !in_tiles) context.offload->prefetch(index() - 1);
  back_through(attention(), dy, saved.x,
               {.context = context,
                .saved = saved.attention,
                .gradients = gradients,
                .workspaces = workspaces,
                .prefetch = context.offload && in_tiles,
                .need_dn = need_dx});
  return need_dx ? std::move(dy) : Wide{};
}

Bytes DecoderBlock::kept_bytes(int64_t tokens, Keep keep, at::ScalarType dtype, bool stacked) const {
  if (keep == Keep::kInputOnHost) return {};
  const at::NoGradGuard no_grad;
  const at::TensorOptions options = at::TensorOptions().dtype(dtype).device(at::kMeta), wide_options = options.dtype(at::kFloat);
  Weights nowhere;
  for (const at::Tensor& dense : weights().dense) nowhere.dense.push_back(at::empty(dense.sizes(), options));
  for (const FrozenWeight& weight : weights().projections)
    nowhere.projections.emplace_back(at::empty({weight.out_features(), weight.in_features()}, options));
  DecoderBlock block(shape(), std::move(nowhere), index());
  for (size_t i = 0; i < adapters().size(); ++i) {
    if (const auto& own = adapters()[i])
      block.adapters()[i] = LoraAdapter{at::empty(own->a.sizes(), wide_options), at::empty(own->b.sizes(), wide_options), 1.0, 0.0};
  }
  const at::Tensor angles = at::empty({tokens, shape().head_dim / 2}, wide_options);
  StepContext context{.rotations = std::vector<Rotation>(shape().layer.rope + 1, {angles, angles, {}}),
                      .positions = at::empty({tokens}, options.dtype(at::kLong)),
                      .row_starts = {0, tokens},
                      .stacked = stacked,
                      .offload = nullptr,
                      .weights = nullptr,
                      .memory = {}};
  Saved saved;
  static_cast<void>(block.forward(at::empty({tokens, shape().hidden}, options), context, &saved, keep));
  return saved.nbytes();
}

Bytes DecoderBlock::kept_bytes(const format::ModelConfig& config, int64_t tokens, Keep keep, at::ScalarType dtype, bool stacked) {
  const at::TensorOptions options = at::TensorOptions().dtype(dtype).device(at::kMeta);
  Weights nowhere;
  for (const format::Parameter& parameter : format::parameters(config)) {
    if (parameter.layer != 0) continue;
    const at::Tensor tensor = at::empty(parameter.shape, options);
    if (parameter.role == format::Role::kLinear) nowhere.projections.emplace_back(tensor);
    else nowhere.dense.push_back(tensor);
  }
  return DecoderBlock(Shape::of(config, 0), std::move(nowhere), 0).kept_bytes(tokens, keep, dtype, stacked);
}

}  // namespace qlorapp
