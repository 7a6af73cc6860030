// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/io/adapter.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <map>
#include <set>

#include "qlorapp/core/check.hpp"
#include "qlorapp/core/nearest_name.hpp"
#include "qlorapp/format/adapter_config.hpp"
#include "qlorapp/format/atomic_file.hpp"
#include "qlorapp/format/folder.hpp"
#include "qlorapp/io/tensor_file.hpp"

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
void copy_values(AdapterArena& arena, const format::SafetensorsFile& file) {
  std::set<std::string_view> wanted;
  std::vector<std::string_view> known;
  for (const auto& entry : arena.entries()) {
    wanted.insert(entry.name);
    known.push_back(entry.name);
  }
  for (const format::TensorEntry& entry : file.tensors()) {
    QLORAPP_CHECK_FORMAT(wanted.contains(entry.name), "[adapter] ", file.path(), " holds '", entry.name,
                         "', which this model and adapter_config.json have no place for.", did_you_mean(entry.name, known),
                         " Is it the adapter of another base model?");
  }
  std::vector<at::Tensor> values;  // all are checked before the first is copied
  for (const auto& entry : arena.entries()) {
    const format::TensorEntry* found = file.find(entry.name);
    QLORAPP_CHECK_FORMAT(found != nullptr, "[adapter] ", file.path(), " lacks '", entry.name,
                         "', which adapter_config.json asks for. Is it the adapter of another base model?");
    QLORAPP_CHECK_FORMAT(found->shape == entry.shape, "[adapter] ", file.path(), ": '", entry.name, "' must have shape ",
                         entry.shape, " for this base model; got ", found->shape,
                         ". It is the adapter of another base model or rank.");
    at::Tensor value = read_tensor(file, *found);
    QLORAPP_CHECK_FORMAT(at::isFloatingType(value.scalar_type()), "[adapter] ", file.path(), ": '", entry.name,
                         "' must be float32, float16 or bfloat16; got ", format::dtype_name(found->dtype), ".");
    value = value.to(at::kFloat);
    QLORAPP_CHECK_FORMAT(value.isfinite().all().item<bool>(), "[adapter] ", file.path(), ": '", entry.name,
                         "' must be finite; it holds inf or nan.");
    values.push_back(std::move(value));
  }
  const at::NoGradGuard no_grad;
  for (int64_t i = 0; i < arena.size(); ++i) arena.parameter(i).detach().copy_(values[static_cast<size_t>(i)]);
}

}  // namespace

void save_adapter(const CausalLM& model, const std::string& folder, const std::string& base_model) {
  QLORAPP_CHECK_VALUE(model.has_adapters(), "[adapter] the model has no adapters to save.");
  QLORAPP_CHECK_VALUE(
      model.arena().values().isfinite().all().item<bool>(),
      "[adapter] the adapters hold inf or nan and were not saved; training has diverged. Resume from an earlier checkpoint "
      "with a lower learning_rate.");
  format::make_folders("adapter", folder);
  NamedTensors tensors;
  const AdapterArena& arena = model.arena();
  for (int64_t i = 0; i < arena.size(); ++i) tensors.emplace_back(arena.entries()[static_cast<size_t>(i)].name, arena.parameter(i));
  write_tensors(format::path_in(folder, kWeightsFile), tensors);
  format::AdapterConfig config = to_adapter_config(model.lora_config());
  config.base_model_name_or_path = base_model;
  config.inference_mode = true;
  format::write_file_atomically(format::path_in(folder, "README.md"), model_card(base_model));
  format::save_adapter_config(config, folder);
}

void load_adapter(CausalLM& model, const std::string& folder) {
  const format::AdapterConfig config = format::load_adapter_config(folder);
  const std::string weights = format::path_in(folder, kWeightsFile);
  QLORAPP_CHECK_FORMAT(
      format::exists(weights) || !format::exists(format::path_in(folder, "adapter_model.bin")), "[adapter] ", folder,
      " holds adapter_model.bin, a pickle, which can run any code and is never read; adapter_model.safetensors is needed. "
      "Load it in PEFT, if you trust it, and save it again with save_pretrained().");
  const format::SafetensorsFile file(weights);
  const LoraConfig lora = from_adapter_config(config);
  if (model.has_adapters()) {
    QLORAPP_CHECK_VALUE(model.lora_config().same_shape(lora), "[adapter] the model has other adapters than ", folder,
                        " (rank, targets or scaling differ). Load the base model again.");
  } else {
    model.add_adapters(lora, /*seed=*/0);
  }
  copy_values(model.arena(), file);
}

}  // namespace qlorapp
