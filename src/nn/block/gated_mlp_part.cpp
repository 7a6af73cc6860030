// SPDX-License-Identifier: Apache-2.0
#include "nn/block/gated_mlp_part.hpp"

#include <utility>

#include <ATen/ATen.h>

#include "nn/views.hpp"
#include "ops/gated_activation.hpp"

namespace qlorapp {

GatedMlpPart::GatedMlpPart(const BlockData& data) : BlockPart(data, {format::Group::kGateUp, format::Group::kDown}), data_(data) {}

at::Tensor GatedMlpPart::forward(Wide n, const Call& call, at::Tensor into) const {
  const StepContext& context = call.context;
  const bool keeps = call.pass != Pass::kForward;
  const auto u_of = [&](const ProjectionGroup& group) { return keeps ? of(group, call.saved) : std::span<at::Tensor>(); };
  const auto workspace = [&](format::Group group) {
    return call.workspaces != nullptr ? &(*call.workspaces)[static_cast<size_t>(group)] : nullptr;
  };
  const int64_t tokens = n.buffer.size(0), width = data_.shape.intermediate;
  const at::TensorOptions options = n.buffer.options();
  at::Tensor& buffer = call.saved.tensors[kGateUp];
  {
    const Wide gate_up = wide(tokens, 2 * width, input_spare(context), options);
    input().project(gate_up.values(), n, context, u_of(input()), workspace(format::Group::kGateUp));
    buffer = gate_up.buffer;
  }
  n = {};
  if (call.pass == Pass::kRecompute && !call.needs_output) return {};
  if (!into.defined()) into = at::empty({tokens, data_.shape.hidden}, options);
  const Wide h = wide(tokens, width, output_spare(context), options);
  at::Tensor values = h.values();
  ops::gated_activation_out(columns(buffer, 0, 2 * width), values, data_.shape.activation);
  if (!keeps) buffer.reset();
  output().project(into, h, context, u_of(output()), workspace(format::Group::kDown));
  return into;
}

/// From dy to the gradient of gate|up, with the gradients of down's adapter on the way.
Wide GatedMlpPart::backward_down(const Wide& dy, const BackwardCall& call) const {
  const StepContext& context = call.context;
  const int64_t width = data_.shape.intermediate;
  at::Tensor& kept = call.saved.tensors[kGateUp];
  at::Tensor dh = at::empty({dy.buffer.size(0), width}, dy.buffer.options());
  at::Tensor& shared = call.workspaces[static_cast<size_t>(format::Group::kDown)];
  const at::Tensor workspace = call.keep_workspaces && shared.defined() ? shared : output().workspace(context, dh.scalar_type());
  if (call.keep_workspaces) shared = workspace;
  const ProjectionGroup::Inner v = output().project_back(&dh, dy, context, workspace);
  at::Tensor h;
  Wide dgate_up{kept, 2 * width};
  if (kept.use_count() == 2) {  // its last reader: one pass turns it into its gradient, and dh into h
    at::Tensor values = dgate_up.values();
    ops::gated_activation_backward_(dh, values, data_.shape.activation);
    h = std::move(dh);
  } else {
    const at::Tensor gate_up = dgate_up.values();
    dgate_up.buffer = at::empty_like(kept);
    dgate_up.values().copy_(ops::gated_activation_backward(dh, gate_up, data_.shape.activation));
    if (output().has_adapter()) h = ops::gated_activation(gate_up, data_.shape.activation);
  }
  kept.reset();
  if (!output().has_adapter()) return dgate_up;
  const std::span<at::Tensor> u = of(output(), call.saved);
  if (!output().has_inputs(u)) output().form_inputs(h, context, u, workspace);
  output().add_gradients(dy, h, v, context, u, call.gradients);
  return dgate_up;
}

BlockPart::Pending GatedMlpPart::backward(const Wide& dy, at::Tensor& dn, const BackwardCall& call) const {
  Pending pending{backward_down(dy, call), {}};
  dn = at::empty({dy.buffer.size(0), data_.shape.hidden}, dy.buffer.options());
  at::Tensor& workspace = call.workspaces[static_cast<size_t>(format::Group::kGateUp)];
  pending.v = input().project_back(call.need_dn ? &dn : nullptr, pending.dy, call.context, workspace);
  if (!call.keep_workspaces) workspace.reset();
  return pending;
}

}  // namespace qlorapp
