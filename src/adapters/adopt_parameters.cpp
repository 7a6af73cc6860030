// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/adapters/adopt_parameters.hpp"

#include <ATen/ATen.h>

#include "core/check.hpp"

namespace qlorapp {

AdapterArena adopt_parameters(const std::vector<std::pair<std::string, at::Tensor>>& named) {
  std::vector<std::pair<std::string, std::vector<int64_t>>> names_and_shapes;
  std::vector<at::Tensor> leaves;
  for (const auto& [name, leaf] : named) {
    QLORAPP_CHECK_VALUE(leaf.defined(), "[adapter] '{}' must be a tensor; got an undefined one.", name);
    if (!leaf.requires_grad()) continue;
    QLORAPP_CHECK_VALUE(leaf.is_leaf() && leaf.scalar_type() == at::kFloat,
                        "[adapter] '{}' must be a float32 leaf to be trained in an arena; got a {}{}", name,
                        at::toString(leaf.scalar_type()), leaf.is_leaf() ? " leaf." : " tensor that is no leaf.");
    QLORAPP_CHECK_VALUE(leaves.empty() || leaf.device() == leaves.front().device(),
                        "[adapter] '{}' must be on {}, where the others are; got {}.", name, leaves.front().device().str(),
                        leaf.device().str());
    for (size_t i = 0; i < leaves.size(); ++i) {
      QLORAPP_CHECK_VALUE(!leaf.is_same(leaves[i]), "[adapter] '{}' and '{}' are one tensor; name it once.", name,
                          names_and_shapes[i].first);
    }
    names_and_shapes.emplace_back(name, leaf.sizes().vec());
    leaves.push_back(leaf);
  }
  QLORAPP_CHECK_VALUE(!leaves.empty(),
                      "[adapter] an arena must have something to train; got {} parameters, of which none requires a gradient.",
                      named.size());
  AdapterArena arena(std::move(names_and_shapes), leaves.front().device());
  for (int64_t i = 0; i < arena.size(); ++i) {
    at::Tensor& leaf = leaves[static_cast<size_t>(i)];
    const at::Tensor slice = arena.parameter(i).detach();
    slice.copy_(leaf.detach());
    leaf.set_data(slice);
    arena.adopt_parameter(i, leaf);
  }
  return arena;
}

}  // namespace qlorapp
