// SPDX-License-Identifier: Apache-2.0
// How a block multiplies: projections that share an input as one (in 16 or in eight bits), or each on its own.
#include "adapters/lora_projection.hpp"
#include "nn/decoder_block.hpp"
#include "nn/saved.hpp"
#include "nn/step_context.hpp"

#include <algorithm>
#include <span>
#include <utility>

#include <ATen/ATen.h>

#include "columns.hpp"
#include "core/check.hpp"
#include "nn/float8_stack.hpp"
#include "nn/weight_stream.hpp"
#include "ops/device_memory.hpp"

namespace qlorapp {

const LoraAdapter* DecoderBlock::adapter(Projection projection) const {
  const auto& found = adapters_[qlorapp::index(projection)];
  return found ? &*found : nullptr;
}

std::optional<DropoutKey> DecoderBlock::dropout(Projection projection, const StepContext& context) const {
  if (!context.training) return std::nullopt;
  const auto i = qlorapp::index(projection);
  return context.dropout_key(static_cast<uint32_t>(index_ * 16 + static_cast<int64_t>(i)), weights_.projections[i].in_features());
}

bool DecoderBlock::stacked(const StepContext& context) const {
  if (!context.stacked || context.memory.weight_workspace == WeightWorkspace::kProjection) return false;
  for (const auto& adapter : adapters_) {
    if (context.training && adapter && adapter->dropout > 0) return false;  // then A has an input of its own
    if (adapter && adapter->magnitude.defined()) return false;              // its gradient needs the output before scaling
  }
  return true;
}

const BlockWeights& DecoderBlock::projections(const StepContext& context) const {
  return context.weights ? context.weights->at(index_, context.training) : weights_.projections;
}

ProjectionStack DecoderBlock::stack(const Group& group, const StepContext& context) const {
  return {std::span(projections(context)).subspan(group.begin, group.count),
          std::span(adapters_).subspan(group.begin, group.count)};
}

Float8Stack DecoderBlock::float8_stack(const Group& group, const StepContext& context) const {
  return {std::span(projections(context)).subspan(group.begin, group.count), std::span(adapters_).subspan(group.begin, group.count),
          float8_[group.index]};
}

void DecoderBlock::set_float8(const at::Tensor& ones, const BlockWeights& projections) {
  float8_ = {};
  if (!ones.defined()) return;
  for (const Group& group : {kQkv, kO, kGateUp, kDown}) {
    std::vector<FrozenWeight> weights;
    for (size_t i = group.begin; i < group.begin + group.count; ++i) weights.push_back(projections[i].to(device()));
    const std::string obstacle = Float8Stack::obstacle(weights);
    if (!obstacle.empty()) {
      float8_ = {};
      throw ValueError(message("[fp8] block {} cannot be multiplied in eight bits: {}. Leave fp8 out.", index_, obstacle));
    }
    float8_[group.index] = {Float8Stack::weight_scale(weights), ones};
  }
}

void DecoderBlock::replace_projection(Projection projection, FrozenWeight weight) {
  FrozenWeight& own = weights_.projections[qlorapp::index(projection)];
  weights_.on_host.defined() ? copy_weight(own, weight) : static_cast<void>(own = std::move(weight));
  if (const at::Tensor ones = float8_.front().ones; ones.defined()) set_float8(ones, weights_.projections);
}

DecoderBlock::Weights DecoderBlock::moved(bool to_host) const {
  const at::NoGradGuard no_grad;
  const BlockForms forms = forms_of(weights_.projections);
  Weights result{weights_.norms, {}};
  if (to_host) {
    result.on_host = ops::empty_on_host({bytes_in_one_piece(forms)}, at::kByte, device());
    result.projections = views_of(result.on_host, forms);
  }
  for (size_t i = 0; i < forms.size(); ++i) {
    if (!to_host) {
      result.projections.push_back(empty_weight(forms[i], [&](at::IntArrayRef shape, at::ScalarType dtype) {
        return at::empty(shape, at::TensorOptions().dtype(dtype).device(device()));
      }));
    }
    copy_weight(result.projections[i], weights_.projections[i]);
  }
  return result;
}

int64_t DecoderBlock::spare(const StepContext& context, std::initializer_list<Group> groups) const {
  int64_t most = 0;
  if (stacked(context)) {
    for (const Group& group : groups) most = std::max(most, stack(group, context).spare());
  }
  return most;
}

void DecoderBlock::project(const Group& group, at::Tensor y, const Wide& x, const StepContext& context, Saved* saved,
                           at::Tensor* cache) const {
  int64_t column = 0;
  if (stacked(context)) {
    at::Tensor u;
    if (context.float8) {
      u = float8_stack(group, context).forward(y, x.values());
    } else {
      const ProjectionStack projections = stack(group, context);
      const at::Tensor workspace = cache != nullptr && cache->defined() ? *cache : projections.workspace(y.scalar_type());
      u = projections.forward(y, x, workspace);
      if (u.defined() && saved != nullptr && x.spare() > 0) {
        u = u.narrow(1, 0, projections.rank()).contiguous();  // out of the columns behind x, which is not kept
      }
      if (cache != nullptr) *cache = workspace;
    }
    if (u.defined() && saved != nullptr) {
      for (size_t i = group.begin; i < group.begin + group.count; ++i) {
        if (!adapters_[i]) continue;
        saved->u[i] = u.narrow(1, column, adapters_[i]->a.size(0));
        column += adapters_[i]->a.size(0);
      }
    }
    return;
  }
  const at::Tensor values = x.values();
  const BlockWeights& weights = projections(context);
  for (size_t i = group.begin; i < group.begin + group.count; ++i) {
    const auto projection = static_cast<Projection>(i);
    at::Tensor part = columns(y, column, weights[i].out_features());
    at::Tensor u = lora_projection_forward(part, values, weights[i], adapter(projection), dropout(projection, context));
    if (saved != nullptr) saved->u[i] = std::move(u);
    column += part.size(1);
  }
}

DecoderBlock::Inner DecoderBlock::project_back(const Group& group, at::Tensor* dx, const Wide& dy, const StepContext& context,
                                               const at::Tensor& workspace) const {
  Inner v;
  if (stacked(context) && context.float8) {
    float8_stack(group, context).backward_input(dx, dy);
    return v;
  }
  if (stacked(context)) {
    const ProjectionStack projections = stack(group, context);
    projections.backward_input(dx, dy, workspace.defined() ? workspace : projections.workspace(dy.buffer.scalar_type()));
    return v;
  }
  int64_t column = 0;
  const BlockWeights& weights = projections(context);
  for (size_t i = group.begin; i < group.begin + group.count; ++i) {
    const auto projection = static_cast<Projection>(i);
    const at::Tensor part = columns(dy.buffer, column, weights[i].out_features());
    v[i - group.begin] = lora_projection_backward_input(dx, /*accumulate=*/column > 0, part, weights[i], adapter(projection),
                                                        dropout(projection, context));
    column += part.size(1);
  }
  return v;
}

void DecoderBlock::add_gradients(const Group& group, const Wide& dy, const at::Tensor& x, const Inner& v,
                                 const StepContext& context, const Saved& saved, const Gradients& gradients) const {
  if (stacked(context)) {
    stack(group, context)
        .backward_adapters(dy, x, std::span(saved.u).subspan(group.begin, group.count),
                           std::span(gradients).subspan(group.begin, group.count));
    return;
  }
  int64_t column = 0;
  const BlockWeights& weights = projections(context);
  for (size_t i = group.begin; i < group.begin + group.count; ++i) {
    const auto projection = static_cast<Projection>(i);
    const at::Tensor part = columns(dy.buffer, column, weights[i].out_features());
    if (const LoraAdapter* const own = adapter(projection)) {
      lora_projection_backward_adapter(part, x, saved.u[i], v[i - group.begin], weights[i], *own, dropout(projection, context),
                                       gradients[i]);
    }
    column += part.size(1);
  }
}

}  // namespace qlorapp
