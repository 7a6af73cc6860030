// SPDX-License-Identifier: Apache-2.0
/// adapter_config.json for merging, which needs the adapter's matrices alone and so accepts more than computing it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "qlorapp/format/adapter_config.hpp"

namespace qlorapp::format {

/// The way out for an adapter that is only PEFT's to merge.
inline constexpr std::string_view kMergeInPython =
    "Merge it in Python: peft.AutoPeftModelForCausalLM.from_pretrained(ADAPTER, dtype=\"auto\").merge_and_unload()"
    ".save_pretrained(OUTPUT).";

enum class AdapterUse : uint8_t { kCompute, kMerge };

/// @throws as without a use, which is to compute.
[[nodiscard]] AdapterConfig parse_adapter_config(std::string_view json, std::string_view where, AdapterUse use);
[[nodiscard]] AdapterConfig load_adapter_config(const std::string& folder, AdapterUse use);

}  // namespace qlorapp::format
