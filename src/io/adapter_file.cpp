// SPDX-License-Identifier: Apache-2.0
#include "adapter_file.hpp"

#include <ATen/ATen.h>

#include <array>
#include <cstdio>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "qlorapp/core/check.hpp"
#include "qlorapp/core/nearest_name.hpp"
#include "qlorapp/format/folder.hpp"
#include "qlorapp/io/tensor_file.hpp"

namespace qlorapp {

AdapterFile open_adapter(const std::string& folder) {
  format::AdapterConfig config = format::load_adapter_config(folder);
  const std::string weights = format::path_in(folder, kAdapterWeights);
  QLORAPP_CHECK_FORMAT(
      format::exists(weights) || !format::exists(format::path_in(folder, "adapter_model.bin")), "[adapter] ", folder,
      " holds adapter_model.bin, a pickle, which can run any code and is never read; adapter_model.safetensors is needed. "
      "Load it in PEFT, if you trust it, and save it again with save_pretrained().");
  format::SafetensorsFile file(weights);
  LoraConfig lora = from_adapter_config(config);
  return {std::move(config), std::move(lora), std::move(file)};
}

std::string fingerprint_text(uint64_t fingerprint) {
  std::array<char, 17> text{};
  std::snprintf(text.data(), text.size(), "%016llx", static_cast<unsigned long long>(fingerprint));
  return text.data();
}

void check_fingerprint(const format::AdapterConfig& config, const std::string& folder, const std::string& fingerprint) {
  QLORAPP_CHECK_VALUE(
      !config.base_fingerprint || *config.base_fingerprint == fingerprint, "[adapter] ", folder,
      " was trained on the base that its initialization left, and this is another. Load the base that was saved beside it.");
}

void check_names_and_shapes(const AdapterSet& set, const format::SafetensorsFile& file) {
  const NamedTensors tensors = set.named_tensors();
  std::set<std::string_view> wanted;
  std::vector<std::string_view> known;
  for (const auto& [name, tensor] : tensors) {
    wanted.insert(name);
    known.push_back(name);
  }
  for (const format::TensorEntry& entry : file.tensors()) {
    QLORAPP_CHECK_FORMAT(wanted.contains(entry.name), "[adapter] ", file.path(), " holds '", entry.name,
                         "', which this model and adapter_config.json have no place for.", did_you_mean(entry.name, known),
                         " Is it the adapter of another base model?");
  }
  for (const auto& [name, tensor] : tensors) {
    const format::TensorEntry* found = file.find(name);
    QLORAPP_CHECK_FORMAT(found != nullptr, "[adapter] ", file.path(), " lacks '", name,
                         "', which adapter_config.json asks for. Is it the adapter of another base model?");
    QLORAPP_CHECK_FORMAT(found->shape == tensor.sizes().vec(), "[adapter] ", file.path(), ": '", name, "' must have shape ",
                         tensor.sizes().vec(), " for this base model; got ", found->shape,
                         ". It is the adapter of another base model or rank.");
    QLORAPP_CHECK_FORMAT(at::isFloatingType(scalar_type_of(found->dtype, name)), "[adapter] ", file.path(), ": '", name,
                         "' must be float32, float16 or bfloat16; got ", format::dtype_name(found->dtype), ".");
  }
}

at::Tensor read_value(const format::SafetensorsFile& file, const std::string& name) {
  const at::Tensor value = read_tensor(file, file.at(name)).to(at::kFloat);
  QLORAPP_CHECK_FORMAT(value.isfinite().all().item<bool>(), "[adapter] ", file.path(), ": '", name,
                       "' must be finite; it holds inf or nan.");
  return value;
}

}  // namespace qlorapp
