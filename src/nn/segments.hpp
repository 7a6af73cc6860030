// SPDX-License-Identifier: Apache-2.0
/// Segments of a decoder's blocks, forward and backward: by hand, and as one node of an autograd graph for a user's own loop.
#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "nn/decoder.hpp"
#include "nn/saved.hpp"
#include "nn/step_context.hpp"
#include "qlorapp/nn/keep.hpp"

namespace qlorapp {

/// @param saved  gets one entry, which holds what the segment's policy names; null when no backward will follow.
[[nodiscard]] at::Tensor run_segment(const Decoder& decoder, const Segment& segment, const at::Tensor& x,
                                     const StepContext& context, std::vector<Saved>* saved);

/// Of several blocks all but the last run forward again keeping everything; the last one does so inside its own backward, stopping
/// before down_proj.
/// @param saved      what run_segment() saved, taken over.
/// @param gradients  of each block's adapters; added to.
/// @param need_dx    whether the gradient of the segment's input is wanted.
[[nodiscard]] Wide run_segment_back(const Decoder& decoder, const Segment& segment, Wide dy, const StepContext& context,
                                    std::vector<Saved> saved, const std::vector<DecoderBlock::Gradients>& gradients, bool need_dx);

/// The same on a graph. Its inputs are x and the segment's adapters, so that hooks, torch.autograd.grad and retain_graph work; what the
/// keep policy names is saved on the graph and freed with it. Backward computes with the adapters of the forward pass, even if others
/// are active by then. The graph keeps the decoder alive.
[[nodiscard]] at::Tensor run_segment_autograd(const std::shared_ptr<Decoder>& decoder, const Segment& segment, const at::Tensor& x,
                                              std::shared_ptr<const StepContext> context);

}  // namespace qlorapp
