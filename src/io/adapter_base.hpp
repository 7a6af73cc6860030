// SPDX-License-Identifier: Apache-2.0
/// qlorapp_base.json beside an adapter: the base that it was trained on. PEFT ignores the file.
///
///     {"schema": 1, "storage": "nf4, 64 per block, …", "fingerprint": "<16 hex digits>",
///      "sample": [["model.embed_tokens.weight", 12, 7, 0.0123], …]}
///
/// The fingerprint (nn/base_fingerprint.hpp) counts every byte, so it is compared only where the base is stored in the same way. The sample
/// is numbers of tables and norms, which no form of a base quantizes, at [name, row, column]. It is compared up to the rounding of bfloat16:
/// a base in four bits, or saved in another dtype, has the same numbers.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include <ATen/core/Tensor.h>

#include "format/tensor_files.hpp"
#include "qlorapp/nn/causal_lm.hpp"

namespace qlorapp {

inline constexpr std::string_view kAdapterBase = "qlorapp_base.json";

/// The file's text; empty for a sharded base. @param folder  of the adapter. The fingerprint, for which the whole base is
/// read, is left out of a checkpoint under construction.
[[nodiscard]] std::string adapter_base_text(const CausalLM& model, const std::string& folder);

/// Logs one warning if the adapter in `folder` names another base than this one. Without the file it does nothing.
/// @throws FormatError for a file that is none of this library's.
void check_adapter_base(const std::string& folder, const CausalLM& model);
/// The same for a base in its folder; the sample alone is compared.
void check_adapter_base(const std::string& folder, const format::TensorFiles& base);

}  // namespace qlorapp
