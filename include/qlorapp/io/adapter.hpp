// SPDX-License-Identifier: Apache-2.0
/// Adapters as PEFT stores them: adapter_model.safetensors and adapter_config.json. docs/formats/adapter.md.
#pragma once

#include <string>

#include "qlorapp/nn/causal_lm.hpp"

namespace qlorapp {

/// Writes the model's adapters into `folder` (made if missing). Each file appears whole or not at all; PEFT loads the folder.
/// @param base_model  what adapter_config.json names as the base: the folder or hub name that the user gave.
/// @param name        of the adapter; the active one unless given.
/// @throws ValueError if there are no adapters, or a value is not finite; IoError.
void save_adapter(const CausalLM& model, const std::string& folder, const std::string& base_model, const std::string& name = "");

/// Adds the adapters of a PEFT folder under a name that the model does not have yet, or replaces the values of equal adapters.
/// @throws FormatError naming the file and what is wrong: no adapter there, a tensor that is missing, unknown, of another shape
///         (an adapter of another base), not finite; ValueError if the model has other adapters of that name, or another base
///         than the one that an initialization left when the adapter was trained.
void load_adapter(CausalLM& model, const std::string& folder, const std::string& name = kDefaultAdapter);

}  // namespace qlorapp
