// SPDX-License-Identifier: Apache-2.0
/// A PEFT adapter folder, open and believed in nothing: what is in it is compared with what its config and the model ask for.
#pragma once

#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "core/check.hpp"
#include "files/folder.hpp"
#include "format/adapter_use.hpp"
#include "format/safetensors.hpp"
#include "qlorapp/adapters/lora_config.hpp"
#include "qlorapp/format/adapter_config.hpp"

namespace qlorapp {

inline constexpr std::string_view kAdapterWeights = "adapter_model.safetensors";
inline constexpr std::string_view kAdapterConfig = "adapter_config.json";

struct AdapterFile {
  format::AdapterConfig config;
  LoraConfig lora;  ///< The same, checked.
  format::SafetensorsFile file;
  bool is_as_written = true;  ///< False if a manifest says otherwise.
};

/// @throws FormatError, IoError: no adapter there, a pickle, a config that is not supported.
[[nodiscard]] AdapterFile open_adapter(const std::string& folder, format::AdapterUse use = format::AdapterUse::kCompute);

/// Calls `work`. What adapter_config.json asks for in vain is a FormatError that names it.
template <class Work>
decltype(auto) as_config_asks(const std::string& folder, const Work& work) {
  try {
    return work();
  } catch (const ValueError& error) { throw FormatError(message("[{}] {}", files::path_in(folder, kAdapterConfig), error.what())); }
}

/// The 16 digits of a fingerprint in adapter_config.json.
[[nodiscard]] std::string fingerprint_text(uint64_t fingerprint);
/// @param fingerprint  of the base at hand.  @throws ValueError if the adapter was trained on another one that it names.
void check_fingerprint(const format::AdapterConfig& config, const std::string& folder, const std::string& fingerprint);

/// That the file holds these tensors, each of its shape, and no other than `others`. @throws FormatError naming the tensor.
void check_names_and_shapes(const std::vector<std::pair<std::string, at::Tensor>>& tensors, const format::SafetensorsFile& file,
                            const std::set<std::string>& others = {});

/// One of those tensors in float32. @throws FormatError naming it, if it is not floating or not finite.
[[nodiscard]] at::Tensor read_value(const format::SafetensorsFile& file, const std::string& name);

}  // namespace qlorapp
