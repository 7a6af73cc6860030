// SPDX-License-Identifier: Apache-2.0
/// A segment of blocks as one node of an autograd graph, for a user's own loop.
#pragma once

#include <memory>

#include <ATen/core/Tensor.h>

#include "qlorapp/nn/keep.hpp"
#include "qlorapp/nn/step_context.hpp"

namespace qlorapp {

class CausalLM;

/// Forward of the segment. Its inputs are x and the segment's adapters, so that hooks, torch.autograd.grad and retain_graph
/// work; what the keep policy names is saved on the graph and freed with it. Backward computes with the adapters of the forward pass,
/// whichever are active by then. A model that no shared_ptr owns must outlive the graph.
[[nodiscard]] at::Tensor run_segment_autograd(CausalLM& model, const Segment& segment, const at::Tensor& x,
                                              std::shared_ptr<const StepContext> context);

}  // namespace qlorapp
