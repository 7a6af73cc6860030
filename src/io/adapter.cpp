// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/io/adapter.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "adapter_file.hpp"
#include "qlorapp/core/check.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/format/adapter_config.hpp"
#include "qlorapp/format/atomic_file.hpp"
#include "qlorapp/format/folder.hpp"
#include "qlorapp/io/tensor_file.hpp"
#include "qlorapp/nn/base_fingerprint.hpp"

namespace qlorapp {
namespace {

/// PEFT writes a model card; hubs and people expect one.
std::string model_card(const std::string& base_model) {
  return concat(
      "---\nbase_model: ", base_model, "\nlibrary_name: peft\npipeline_tag: text-generation\ntags:\n- lora\n- qlorapp\n---\n\n",
      "# LoRA adapter for ", base_model, "\n\nTrained with qlorapp. Load it with PEFT:\n\n```python\n",
      "from peft import PeftModel\nfrom transformers import AutoModelForCausalLM\n\n",
      "model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(\"", base_model, "\"), \"<this folder>\")\n```\n");
}

/// All are checked before the first is copied.
void copy_values(const AdapterSet& set, const format::SafetensorsFile& file) {
  check_names_and_shapes(set, file);
  const NamedTensors tensors = set.named_tensors();
  std::vector<at::Tensor> values;
  for (const auto& [name, tensor] : tensors) values.push_back(read_value(file, name));
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

}  // namespace

void save_adapter(const CausalLM& model, const std::string& folder, const std::string& base_model, const std::string& name) {
  QLORAPP_CHECK_VALUE(!model.adapters().empty(), "[adapter] the model has no adapters to save.");
  const AdapterSet& set = model.adapters().at(name);
  QLORAPP_CHECK_VALUE(
      set.arena.values().isfinite().all().item<bool>(),
      "[adapter] the adapters hold inf or nan and were not saved; training has diverged. Resume from an earlier checkpoint "
      "with a lower learning_rate.");
  format::make_folders("adapter", folder);
  write_tensors(format::path_in(folder, kAdapterWeights), set.named_tensors());
  format::AdapterConfig config = to_adapter_config(set.config);
  config.base_model_name_or_path = base_model;
  config.inference_mode = true;
  if (model.adapters().changed_base()) {
    config.base_fingerprint = fingerprint_text(four_bit_fingerprint(model));
    log_warning_once(
        "[adapter] the initialization took a part out of the base: this adapter fits no other. Save the base too, with the "
        "model's own "
        "save_pretrained, and load the adapter onto that.");
  }
  format::write_file_atomically(format::path_in(folder, "README.md"), model_card(base_model));
  format::save_adapter_config(config, folder);
}

void load_adapter(CausalLM& model, const std::string& folder, const std::string& name) {
  const AdapterFile adapter = open_adapter(folder);
  if (adapter.config.base_fingerprint) check_fingerprint(adapter.config, folder, fingerprint_text(four_bit_fingerprint(model)));
  const LoraConfig& lora = adapter.lora;
  const std::vector<std::string> names = model.adapters().names();
  const bool is_there = std::find(names.begin(), names.end(), name) != names.end();
  if (is_there) {
    QLORAPP_CHECK_VALUE(model.adapters().at(name).config.same_shape(lora), "[adapter] the model has other adapters than ", folder,
                        " (rank, targets or scaling differ). Load the base model again, or give "
                        "another adapter_name.");
  } else {
    model.add_adapters(lora, /*seed=*/0, name);
  }
  try {
    copy_values(model.adapters().at(name), adapter.file);
  } catch (...) {
    if (!is_there) model.adapters().remove(name);
    throw;
  }
}

}  // namespace qlorapp
