// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/io/adapter.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <set>

#include "qlorapp/core/check.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/core/nearest_name.hpp"
#include "qlorapp/format/adapter_config.hpp"
#include "qlorapp/format/atomic_file.hpp"
#include "qlorapp/format/folder.hpp"
#include "qlorapp/io/tensor_file.hpp"
#include "qlorapp/nn/base_fingerprint.hpp"

namespace qlorapp {
namespace {

constexpr std::string_view kWeightsFile = "adapter_model.safetensors";

/// PEFT writes a model card; hubs and people expect one.
std::string model_card(const std::string& base_model) {
  return concat(
      "---\nbase_model: ", base_model, "\nlibrary_name: peft\npipeline_tag: text-generation\ntags:\n- lora\n- qlorapp\n---\n\n",
      "# LoRA adapter for ", base_model, "\n\nTrained with qlorapp. Load it with PEFT:\n\n```python\n",
      "from peft import PeftModel\nfrom transformers import AutoModelForCausalLM\n\n",
      "model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(\"", base_model, "\"), \"<this folder>\")\n```\n");
}

/// Adapters with the names and shapes of the file, checked one by one so that a wrong base is said clearly.
void copy_values(const AdapterSet& set, const format::SafetensorsFile& file) {
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
  std::vector<at::Tensor> values;  // all are checked before the first is copied
  for (const auto& [name, tensor] : tensors) {
    const format::TensorEntry* found = file.find(name);
    QLORAPP_CHECK_FORMAT(found != nullptr, "[adapter] ", file.path(), " lacks '", name,
                         "', which adapter_config.json asks for. Is it the adapter of another base model?");
    QLORAPP_CHECK_FORMAT(found->shape == tensor.sizes().vec(), "[adapter] ", file.path(), ": '", name, "' must have shape ",
                         tensor.sizes().vec(), " for this base model; got ", found->shape,
                         ". It is the adapter of another base model or rank.");
    at::Tensor value = read_tensor(file, *found);
    QLORAPP_CHECK_FORMAT(at::isFloatingType(value.scalar_type()), "[adapter] ", file.path(), ": '", name,
                         "' must be float32, float16 or bfloat16; got ", format::dtype_name(found->dtype), ".");
    value = value.to(at::kFloat);
    QLORAPP_CHECK_FORMAT(value.isfinite().all().item<bool>(), "[adapter] ", file.path(), ": '", name,
                         "' must be finite; it holds inf or nan.");
    values.push_back(std::move(value));
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {  // a table that is embedding and head stands in the file twice
      QLORAPP_CHECK_FORMAT(!tensors[i].second.is_same(tensors[j].second) || at::equal(values[i], values[j]), "[adapter] ",
                           file.path(), ": '", tensors[i].first, "' and '", tensors[j].first,
                           "' differ, but adapter_config.json says that they are one table (ensure_weight_tying).");
    }
  }
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < tensors.size(); ++i) tensors[i].second.detach().copy_(values[i]);
}

std::string hexadecimal(uint64_t value) {
  std::array<char, 17> text{};
  std::snprintf(text.data(), text.size(), "%016llx", static_cast<unsigned long long>(value));
  return text.data();
}

}  // namespace

void save_adapter(const CausalLM& model, const std::string& folder, const std::string& base_model, const std::string& name) {
  QLORAPP_CHECK_VALUE(model.has_adapters(), "[adapter] the model has no adapters to save.");
  const AdapterSet& set = model.adapters(name);
  QLORAPP_CHECK_VALUE(
      set.arena.values().isfinite().all().item<bool>(),
      "[adapter] the adapters hold inf or nan and were not saved; training has diverged. Resume from an earlier checkpoint "
      "with a lower learning_rate.");
  format::make_folders("adapter", folder);
  write_tensors(format::path_in(folder, kWeightsFile), set.named_tensors());
  format::AdapterConfig config = to_adapter_config(set.config);
  config.base_model_name_or_path = base_model;
  config.inference_mode = true;
  if (model.base_was_changed()) {
    config.base_fingerprint = hexadecimal(four_bit_fingerprint(model));
    log_warning_once(
        "[adapter] the initialization took a part out of the base: this adapter fits no other. Save the base too, with the "
        "model's own "
        "save_pretrained, and load the adapter onto that.");
  }
  format::write_file_atomically(format::path_in(folder, "README.md"), model_card(base_model));
  format::save_adapter_config(config, folder);
}

void load_adapter(CausalLM& model, const std::string& folder, const std::string& name) {
  const format::AdapterConfig config = format::load_adapter_config(folder);
  const std::string weights = format::path_in(folder, kWeightsFile);
  QLORAPP_CHECK_FORMAT(
      format::exists(weights) || !format::exists(format::path_in(folder, "adapter_model.bin")), "[adapter] ", folder,
      " holds adapter_model.bin, a pickle, which can run any code and is never read; adapter_model.safetensors is needed. "
      "Load it in PEFT, if you trust it, and save it again with save_pretrained().");
  const format::SafetensorsFile file(weights);
  QLORAPP_CHECK_VALUE(
      !config.base_fingerprint || *config.base_fingerprint == hexadecimal(four_bit_fingerprint(model)), "[adapter] ", folder,
      " was trained on the base that its initialization left, and this is another. Load the base that was saved beside it.");
  const LoraConfig lora = from_adapter_config(config);
  const std::vector<std::string> names = model.adapter_names();
  const bool is_there = std::find(names.begin(), names.end(), name) != names.end();
  if (is_there) {
    QLORAPP_CHECK_VALUE(model.adapters(name).config.same_shape(lora), "[adapter] the model has other adapters than ", folder,
                        " (rank, targets or scaling differ). Load the base model again, or give "
                        "another adapter_name.");
  } else {
    model.add_adapters(lora, /*seed=*/0, name);
  }
  try {
    copy_values(model.adapters(name), file);
  } catch (...) {
    if (!is_there) model.delete_adapters(name);
    throw;
  }
}

}  // namespace qlorapp
