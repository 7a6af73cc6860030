// SPDX-License-Identifier: Apache-2.0
/// Embedding and head that an adapter folder holds as its model had them, beside what modules_to_save trained: tables that were resized
/// for new tokens, or saved along (PEFT's save_embedding_layers).
#pragma once

#include <cstdint>
#include <set>
#include <string>

#include "adapter_file.hpp"
#include "qlorapp/nn/causal_lm.hpp"

namespace qlorapp {

/// Makes them the model's, in its dtype; its vocabulary becomes theirs.
/// @returns the names in the file that are no adapter of the model.
/// @throws FormatError for a table of another width, or tables of different rows; ValueError if ranks hold parts of the model's.
std::set<std::string> adopt_saved_tables(CausalLM& model, const AdapterFile& adapter);

/// @throws ValueError, naming `qlorapp merge`, if the adapter changes what CausalLM has no adapters for: matrices on the tables, norms.
void check_computes(const AdapterFile& adapter);

}  // namespace qlorapp
