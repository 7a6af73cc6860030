// SPDX-License-Identifier: Apache-2.0
/// One named adapter of a model: its config, its values in one arena, and where in the model each of them belongs.
///
/// A model may hold several; one is active at a time. Modules that modules_to_save names (the embedding table, the head) are
/// entries of the arena like A and B, whole and in float32; a table that a tied head shares (ensure_weight_tying) is one entry.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "qlorapp/adapters/adapter_arena.hpp"
#include "qlorapp/adapters/lora_adapter.hpp"
#include "qlorapp/adapters/lora_config.hpp"

namespace qlorapp {

/// In front of every name that PEFT stores.
inline constexpr std::string_view kPeftPrefix = "base_model.model.";

struct AdapterSet {
  /// Indices into the arena, or -1.
  struct Slot {
    int64_t a = -1, b = -1, magnitude = -1;
  };
  LoraConfig config;
  AdapterArena arena;
  std::vector<std::vector<Slot>> slots;                         ///< Of each block's linear layers.
  std::vector<std::vector<std::optional<LoraAdapter>>> blocks;  ///< As the blocks use them.
  int64_t embed_tokens = -1, lm_head = -1;                      ///< Equal where one table is both.

  /// Points `blocks` at the arena's parameters, which a binding may have replaced by its own tensor objects.
  void bind();
  /// The tensors of this adapter's file, under PEFT's names. A table that is embedding and head is in it twice, as in PEFT's.
  [[nodiscard]] std::vector<std::pair<std::string, at::Tensor>> named_tensors() const;
};

}  // namespace qlorapp
