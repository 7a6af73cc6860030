// SPDX-License-Identifier: Apache-2.0
/// A model whose steps somebody else computes, as the trainer knows it: what is trained, and how that is saved.
///
/// The trainer keeps epochs, events, logs, optimizer, schedule, loss scale and checkpoints; TrainerCallbacks' step and evaluate
/// compute. Python trains models of transformers in this way.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "qlorapp/nn/adapter_arena.hpp"

namespace qlorapp {

struct ForeignModel {
  AdapterArena* arena = nullptr;  ///< Values and gradients of what is trained, adopted by the model; it must outlive the trainer.
  bool computes_in_half = false;  ///< In float16, whose gradients need a loss scale.
  int64_t parameter_count = 0;    ///< Without embeddings; for total_flos.
  uint64_t fingerprint = 0;       ///< Of the frozen weights: a run is never resumed on others.
  std::function<void(const std::string& folder)> save_adapter;  ///< A PEFT folder's files.
  std::function<void(const std::string& folder)> load_adapter;  ///< Values into the arena's parameters, in place.
};

}  // namespace qlorapp
