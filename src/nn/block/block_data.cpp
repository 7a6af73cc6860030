// SPDX-License-Identifier: Apache-2.0
#include "nn/block/block_data.hpp"

#include <utility>

#include <ATen/ATen.h>

#include "nn/weight_stream.hpp"

namespace qlorapp {
namespace {

constexpr std::array kAdded{format::Site::kAfterAttention, format::Site::kAfterMlp};

}  // namespace

BlockData::BlockData(BlockShape block_shape, BlockTensors tensors, int64_t block_index)
    : shape(std::move(block_shape)), weights(std::move(tensors)), adapters(weights.projections.size()), index(block_index) {
  std::array<std::vector<at::Tensor>, format::kGroups> of_group;
  for (size_t i = 0; i < shape.biases.size(); ++i) {
    if (shape.biases[i]) of_group[static_cast<size_t>(shape.linears[i])].push_back(weights.dense[*shape.biases[i]]);
  }
  for (size_t i = 0; i < of_group.size(); ++i) {
    if (!of_group[i].empty()) biases[i] = at::cat(of_group[i]);
  }
  for (size_t i = 0; shape.stream_scale != 1 && i < kAdded.size(); ++i) {
    const auto slot = shape.norm_at(kAdded[i]);
    if (!slot) continue;
    const at::Tensor& weight = weights.dense[*slot];
    const double plus = shape.norm_rule == format::NormRule::kOnePlus ? 1 : 0;
    added_norms[i] = ((weight.to(at::kFloat) + plus) * shape.stream_scale).to(weight.scalar_type());
  }
}

const BlockWeights& BlockData::projections(const StepContext& context) const {
  return context.weights ? context.weights->at(index, context.training) : weights.projections;
}

bool BlockData::stacked(const StepContext& context) const {
  if (!context.stacked || context.memory.weight_workspace == WeightWorkspace::kProjection) return false;
  for (const auto& adapter : adapters) {
    if (context.training && adapter && adapter->dropout > 0) return false;  // then A has an input of its own
    if (adapter && adapter->magnitude.defined()) return false;              // its gradient needs the output before scaling
  }
  return true;
}

at::Tensor BlockData::norm(format::Site site) const {
  for (size_t i = 0; i < kAdded.size(); ++i) {
    if (site == kAdded[i] && added_norms[i].defined()) return added_norms[i];
  }
  const auto slot = shape.norm_at(site);
  return slot ? weights.dense[*slot] : at::Tensor();
}

format::NormRule BlockData::added_rule() const {
  const bool has_one = shape.stream_scale != 1 && shape.norm_rule == format::NormRule::kOnePlus;  // in the weight, with the scale
  return has_one ? format::NormRule::kRoundOnce : shape.norm_rule;
}

}  // namespace qlorapp
