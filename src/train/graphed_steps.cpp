// SPDX-License-Identifier: Apache-2.0
#include "train/graphed_steps.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <string>
#include <utility>

#include "adapters/adapter_set.hpp"
#include "core/check.hpp"
#include "nn/decoder.hpp"
#include "nn/input_offload.hpp"
#include "qlorapp/core/log.hpp"

namespace qlorapp {

bool GraphedSteps::can_record(const Batch& batch) const {
  if (!ops::has_launch_graphs(model_.device()) || batch.token_count() > kMostTokens || model_.settings().pinned_ring() != nullptr)
    return false;
  const AdapterSet& set = model_.adapters().active();
  if (set.embed_tokens >= 0 || set.lm_head >= 0) return false;
  return std::all_of(model_.blocks().begin(), model_.blocks().end(), [](const DecoderBlock& block) {
    return std::none_of(block.adapters().begin(), block.adapters().end(),
                        [](const std::optional<LoraAdapter>& adapter) { return adapter && adapter->dropout > 0; });
  });
}

GraphedSteps::Shape& GraphedSteps::shape_of(const Batch& batch) {
  const auto found = std::find_if(shapes_.begin(), shapes_.end(), [&](const Shape& shape) {
    return shape.target_count == batch.target_count && shape.row_starts == batch.row_starts;
  });
  if (found != shapes_.end()) {
    shapes_.splice(shapes_.begin(), shapes_, found);
  } else {
    shapes_.emplace_front();
    shapes_.front().row_starts = batch.row_starts;
    shapes_.front().target_count = batch.target_count;
    if (std::ssize(shapes_) > kMostShapes) shapes_.pop_back();
  }
  return shapes_.front();
}

LossSum GraphedSteps::record(Shape& shape, const Batch& batch, const at::Tensor& grad_scale, StepKey key) {
  if (std::count_if(shapes_.begin(), shapes_.end(), [](const Shape& other) { return other.graph != nullptr; }) >= kMostGraphs) {
    const auto oldest = std::find_if(shapes_.rbegin(), shapes_.rend(), [](const Shape& other) { return other.graph != nullptr; });
    shapes_.erase(std::next(oldest).base());
  }
  if (++recorded_ == kMostRecordings) {
    log_warning_once(
        message("[trainer] cuda_graphs: more than {} combinations of row lengths repeat; no more of them are recorded. Pack or cut "
                "rows to one length.",
                kMostRecordings));
  }
  shape.batch = batch;
  for (at::Tensor* const tensor : {&shape.batch.tokens, &shape.batch.targets, &shape.batch.positions}) *tensor = tensor->clone();
  shape.grad_scale = grad_scale.clone();
  LossSum result;
  std::string why;
  shape.graph = ops::record_launches(
      model_.device(),
      [&] {
        LossSum sum = model_.forward_backward(shape.batch, shape.grad_scale, key);
        shape.sum = sum;
        if (!result.loss.defined()) result = std::move(sum);
      },
      &why);
  shape.rotations = model_.decoder().rope().last();
  if (shape.graph == nullptr) {
    shape.refused = true;
    shape.sum = {};
    log_warning_once(message("[trainer] cuda_graphs: a micro-step could not be recorded and runs without a graph ({}).", why));
  }
  return result;
}

LossSum GraphedSteps::forward_backward(const Batch& batch, const at::Tensor& grad_scale, StepKey key, const BlockDone& /*done*/) {
  if (!can_record(batch)) return model_.forward_backward(batch, grad_scale, key);
  if (const void* const now = model_.arena().values().const_data_ptr(); now != adapters_) {
    clear();
    adapters_ = now;
  }
  Shape& shape = shape_of(batch);
  if (shape.graph == nullptr) {
    if (shape.refused || recorded_ >= kMostRecordings || ++shape.seen < kSeen)
      return model_.forward_backward(batch, grad_scale, key);
    return record(shape, batch, grad_scale, key);
  }
  shape.batch.tokens.copy_(batch.tokens);
  shape.batch.targets.copy_(batch.targets);
  shape.batch.positions.copy_(batch.positions);
  shape.grad_scale.copy_(grad_scale);
  shape.graph->replay();
  ++replayed_;
  LossSum sum = shape.sum;  // the next replay of any graph writes over it
  sum.loss = sum.loss.clone();
  if (sum.statistics.defined()) sum.statistics = sum.statistics.clone();
  return sum;
}

}  // namespace qlorapp
