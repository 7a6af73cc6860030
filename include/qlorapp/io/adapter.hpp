// SPDX-License-Identifier: Apache-2.0
/// Adapters as PEFT stores them: adapter_model.safetensors and adapter_config.json. docs/formats/adapter.md.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "qlorapp/nn/causal_lm.hpp"

namespace qlorapp {

/// Writes the model's adapters into `folder` (made if missing); PEFT loads it. All files appear together: after a crash at any moment the
/// folder holds the old adapter or, once load_adapter() or save_adapter() is called on it again, the new one.
/// @param base_model  what adapter_config.json names as the base: the folder or hub name that the user gave.
/// @param name        of the adapter; the active one unless given.
/// @throws ValueError if there are no adapters, or a value is not finite; IoError.
void save_adapter(const CausalLM& model, const std::string& folder, const std::string& base_model, const std::string& name = "");

/// Adds the adapters of a PEFT folder under a name that the model does not have yet, or replaces the values of equal adapters. Tables that
/// the folder holds beside them (resized for new tokens, or saved along) become the model's.
/// @throws FormatError naming the file and the fault: no adapter there, a tensor that is missing, unknown, of another shape
///         (an adapter of another base), not finite; ValueError if the model has other adapters of that name, or another base
///         than the one that an initialization left when the adapter was trained.
void load_adapter(CausalLM& model, const std::string& folder, const std::string& name = kDefaultAdapter);

/// The vocabulary of a base of `vocab_size` tokens with this adapter: the rows of the tables in its folder, if it holds any.
[[nodiscard]] int64_t adapter_vocab_size(const std::string& folder, int64_t vocab_size);
/// Does the folder hold tables that load_adapter() makes the model's? save_adapter() does not write them.
[[nodiscard]] bool brings_tables(const std::string& folder, int64_t vocab_size);

/// The same for a model of your own: adapters under the names of its modules, "block0.up.lora_A.weight", as adapter_parameters()
/// (nn/inject.hpp) and LoraLinear::named_parameters return them.
/// @param config  of the adapters. It is written as adapter_config.json, without its task_type, so that PEFT wraps a module of any kind.
/// @throws ValueError if there are none, or a value is not finite; IoError.
void save_adapter(const std::vector<std::pair<std::string, at::Tensor>>& adapters, const LoraConfig& config,
                  const std::string& folder, const std::string& base_model);

/// Copies the values of a PEFT folder into adapters that are there already. All are checked before the first is copied.
/// @returns the folder's config.
/// @throws FormatError naming the file and the tensor that is missing, unknown, of another shape or not finite.
LoraConfig load_adapter(const std::vector<std::pair<std::string, at::Tensor>>& adapters, const std::string& folder);

}  // namespace qlorapp
