// SPDX-License-Identifier: Apache-2.0
/// The one call by which a step trains a model: forward and backward of a micro-batch.
#pragma once

#include <concepts>
#include <cstdint>
#include <functional>

#include <ATen/core/Tensor.h>

#include "qlorapp/nn/batch.hpp"

namespace qlorapp {

/// Key of a micro-batch's dropout masks.
struct StepKey {
  uint64_t seed = 0;        ///< Of the run.
  uint32_t micro_step = 0;  ///< Micro-batches of all ranks since the start of the run. Parts of one micro-batch share it.
};

/// Summed loss of a batch and the number of targets it is summed over.
struct LossSum {
  at::Tensor loss;      ///< () float32 on the model's device.
  int64_t targets = 0;  ///< Host; known from the batch.
  /// (2) float32 on the model's device, over the targets: the sum of the entropies of the predicted distributions, and how many targets have
  /// the highest logit, the first of equal ones. Undefined unless it was asked for (StepSettings::set_token_statistics).
  at::Tensor statistics = {};
};

/// Called in a backward pass when the gradients of block i and of the blocks behind it are whole, in stream order.
using BlockDone = std::function<void(int64_t i)>;

/// A model that train_step can train: CausalLM, or a class of your own. The call adds gradients, times grad_scale, to the arena of the run.
/// grad_scale is () float32 on the model's device. `done` may be empty, and a model may ignore it: ranks then exchange gradients later.
template <class Model>
concept Trainable = requires(Model& model, const Batch& batch, const at::Tensor& grad_scale, StepKey key, const BlockDone& done) {
  { model.forward_backward(batch, grad_scale, key, done) } -> std::convertible_to<LossSum>;
};

}  // namespace qlorapp
