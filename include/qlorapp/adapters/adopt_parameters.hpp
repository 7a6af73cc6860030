// SPDX-License-Identifier: Apache-2.0
/// An arena of parameters that exist already: those of a model of your own, for the optimizers that read an arena.
///
///     model.to(device);
///     AdapterArena arena = adopt_parameters(model.named_parameters());
///     AdamW optimizer(arena, {.state = AdamW::State::kEightBit});
///
/// The order is to(device), adopt_parameters, optimizer. The parameters stay the same tensor objects, so it does not matter when modules,
/// checkpointed blocks or layers that hold them are made.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "qlorapp/adapters/adapter_arena.hpp"

namespace qlorapp {

/// Moves the parameters that require a gradient into one arena, with their values and gradients. Passes over frozen ones.
/// @param named  as LoraLinear::named_parameters() returns them.
/// @throws ValueError if none requires a gradient, one is not a float32 leaf or is on another device than the first, or a name or
///         tensor occurs twice. Nothing has moved then.
[[nodiscard]] AdapterArena adopt_parameters(const std::vector<std::pair<std::string, at::Tensor>>& named);

/// The same for torch::nn::Module::named_parameters().
template <class Named>
requires requires(const Named& named) {
  named.begin()->key();
  named.begin()->value();
}
[[nodiscard]] AdapterArena adopt_parameters(const Named& named) {
  std::vector<std::pair<std::string, at::Tensor>> pairs;
  for (const auto& item : named) pairs.emplace_back(item.key(), item.value());
  return adopt_parameters(pairs);
}

}  // namespace qlorapp
