// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/io/adapter.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstdio>
#include <set>

#include "adapter_file.hpp"
#include "adapters/adapter_set.hpp"
#include "core/check.hpp"
#include "files/atomic_file.hpp"
#include "files/folder.hpp"
#include "files/folder_update.hpp"
#include "io/adapter_base.hpp"
#include "io/tensor_file.hpp"
#include "nn/base_fingerprint.hpp"
#include "nn/decoder.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/format/adapter_config.hpp"
#include "qlorapp/io/gguf.hpp"
#include "saved_tables.hpp"

namespace qlorapp {
namespace {

/// PEFT writes a model card; hubs and people expect one.
std::string model_card(const std::string& base_model) {
  return message(
      "---\nbase_model: {}\nlibrary_name: peft\npipeline_tag: text-generation\ntags:\n- lora\n- qlorapp\n---\n\n# LoRA adapter for "
      "{}\n\nTrained with qlorapp. Load it with PEFT:\n\n```python\nfrom peft import PeftModel\nfrom transformers import "
      "AutoModelForCausalLM\n\nmodel = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(\"{}\"), \"<this "
      "folder>\")\n```\n",
      base_model, base_model, base_model);
}

/// All are checked before the first is copied. @param others  names in the file that are not the adapter's.
void copy_values(const NamedTensors& tensors, const format::SafetensorsFile& file, const std::set<std::string>& others = {}) {
  check_names_and_shapes(tensors, file, others);
  std::vector<at::Tensor> values;
  for (const auto& [name, tensor] : tensors) values.push_back(read_value(file, name));
  for (size_t i = 0; i < tensors.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {  // a table that is embedding and head stands in the file twice
      QLORAPP_CHECK_FORMAT(
          !tensors[i].second.is_same(tensors[j].second) || at::equal(values[i], values[j]),
          "[adapter] {}: '{}' and '{}' must be equal, because adapter_config.json ties them (ensure_weight_tying); they differ.",
          file.path(), tensors[i].first, tensors[j].first);
    }
  }
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < tensors.size(); ++i) tensors[i].second.detach().copy_(values[i]);
}

void write_files(const NamedTensors& tensors, const format::AdapterConfig& config, const std::string& base,
                 const std::string& folder) {
  write_tensors(files::path_in(folder, kAdapterWeights), tensors);
  if (!base.empty()) files::write_file_atomically(files::path_in(folder, kAdapterBase), base);
  files::write_file_atomically(files::path_in(folder, "README.md"), model_card(*config.base_model_name_or_path));
  format::save_adapter_config(config, folder);  // last: without it a folder is no adapter
}

/// @param base  adapter_base_text(), or empty.
void write_folder(const NamedTensors& tensors, format::AdapterConfig config, const std::string& base, const std::string& folder,
                  const std::string& base_model) {
  config.base_model_name_or_path = model_path(base_model);
  config.inference_mode = true;
  if (files::is_staging(folder)) return write_files(tensors, config, base, folder);  // committed as a whole
  files::FolderUpdate update(folder, std::string(kAdapterConfig));
  write_files(tensors, config, base, update.staging());
  if (base.empty()) update.retire(std::string(kAdapterBase));
  update.commit();
}

/// PEFT's names in a file.
NamedTensors with_prefix(const NamedTensors& adapters) {
  NamedTensors tensors;
  for (const auto& [name, tensor] : adapters) tensors.emplace_back(std::string(kPeftPrefix) + name, tensor);
  return tensors;
}

constexpr const char* kNotFinite =
    "[adapter] the adapters hold inf or nan and were not saved; training has diverged. Resume from an earlier checkpoint with a "
    "lower "
    "learning_rate.";

}  // namespace

void save_adapter(const CausalLM& model, const std::string& folder, const std::string& base_model, const std::string& name) {
  QLORAPP_CHECK_VALUE(!model.adapters().empty(), "[adapter] the model has no adapters to save.");
  const AdapterSet& set = model.adapters().at(name);
  QLORAPP_CHECK_VALUE(set.arena.values().isfinite().all().item<bool>(), "{}", kNotFinite);
  format::AdapterConfig config = to_adapter_config(set.config);
  if (model.adapters().changed_base()) {
    config.base_fingerprint = fingerprint_text(*model.adapters().changed_base());
    log_warning_once(
        "[adapter] the initialization changed the base weights. This adapter fits only this base. Save the base too, with the "
        "model's own save_pretrained, and load the adapter onto it.");
  }
  write_folder(set.named_tensors(), std::move(config), adapter_base_text(model, folder), folder, base_model);
}

void save_adapter(const NamedTensors& adapters, const LoraConfig& config, const std::string& folder,
                  const std::string& base_model) {
  QLORAPP_CHECK_VALUE(!adapters.empty(), "[adapter] there are no adapters to save. Call inject() first.");
  for (const auto& [name, tensor] : adapters) QLORAPP_CHECK_VALUE(tensor.isfinite().all().item<bool>(), "{}", kNotFinite);
  format::AdapterConfig written = to_adapter_config(config);
  written.task_type.reset();  // PEFT wraps a causal model only if it can generate
  write_folder(with_prefix(adapters), std::move(written), "", folder, base_model);
}

LoraConfig load_adapter(const NamedTensors& adapters, const std::string& folder) {
  AdapterFile adapter = open_adapter(folder);
  copy_values(with_prefix(adapters), adapter.file);
  return std::move(adapter.lora);
}

void load_adapter(CausalLM& model, const std::string& folder, const std::string& name) {
  const AdapterFile adapter = open_adapter(folder);
  if (adapter.config.base_fingerprint)
    check_fingerprint(adapter.config, folder, fingerprint_text(four_bit_fingerprint(model.decoder())));
  check_computes(adapter);
  if (adapter.is_as_written) check_adapter_base(folder, model);
  const LoraConfig& lora = adapter.lora;
  const std::vector<std::string> names = model.adapters().names();
  const bool is_there = std::find(names.begin(), names.end(), name) != names.end();
  QLORAPP_CHECK_VALUE(!is_there || model.adapters().at(name).config.same_shape(lora),
                      "[adapter] the model has other adapters than {} (rank, targets or scaling differ). Load the base model "
                      "again, or give another adapter_name.",
                      folder);
  Decoder& decoder = model.decoder();
  const at::Tensor embed_tokens = decoder.own_embed_tokens(), lm_head = decoder.own_lm_head();
  bool added = false;
  try {
    const std::set<std::string> others = adopt_saved_tables(model, adapter);
    if (!is_there) as_config_asks(folder, [&] { model.add_adapters(lora, /*seed=*/0, name); });
    added = !is_there;
    copy_values(model.adapters().at(name).named_tensors(), adapter.file, others);
  } catch (...) {  // the model is as it was
    if (added) model.adapters().remove(name);
    if (!decoder.own_embed_tokens().is_same(embed_tokens) || !decoder.own_lm_head().is_same(lm_head))
      decoder.replace_tables(embed_tokens, lm_head);
    throw;
  }
}

}  // namespace qlorapp
