// SPDX-License-Identifier: Apache-2.0
#include "adapter_modules.hpp"

#include <ATen/ATen.h>

#include <set>

#include "core/check.hpp"
#include "format/model_folder.hpp"
#include "io/stored_names.hpp"
#include "io/tensor_file.hpp"

namespace qlorapp {

AdapterModules adapter_modules(const format::ModelConfig& config, const AdapterFile& adapter, const AdapterTensors& tensors) {
  const auto weight_of = [](const std::string& module) { return module + std::string(kWeightSuffix); };
  std::vector<std::string> names;
  for (const auto& [module, lora] : tensors.modules) names.push_back(weight_of(module));
  const StoredNames stored(names);
  AdapterModules out;
  std::set<std::string> found;
  std::vector<format::Parameter> parameters = format::parameters(config);
  if (config.tie_word_embeddings)
    parameters.push_back({std::string(format::kHeadModule), {config.vocab_size, config.hidden_size}, format::Role::kHead});
  for (const format::Parameter& parameter : parameters) {
    const bool adapts = parameter.role != format::Role::kBias && parameter.role != format::Role::kNorm;
    const std::string* const name = adapts ? stored.find(parameter.name()) : nullptr;
    if (name == nullptr) continue;
    found.insert(*name);
    const std::string module = name->substr(0, name->size() - kWeightSuffix.size());
    const AdaptedModule& lora = tensors.modules.at(module);
    const std::vector<int64_t> shape =
        lora.embedding ? std::vector{lora.a->shape[1], lora.b->shape[0]} : std::vector{lora.b->shape[0], lora.a->shape[1]};
    QLORAPP_CHECK_FORMAT(shape == parameter.shape,
                         "[export] {}: '{}' must be of a weight of shape {}; it is of {}. Is it the adapter of another base?",
                         adapter.file.path(), lora.a->name, joined(parameter.shape), joined(shape));
    out.found.emplace(parameter.name(), AdapterModules::Found{parameter, module, &lora});
  }
  for (const auto& [module, lora] : tensors.modules) {
    if (!found.contains(weight_of(module))) out.others.push_back(module);
  }
  return out;
}

bool is_table_of_base(const std::string& model, const AdapterFile& adapter, const AdapterTensors& tensors,
                      const std::string& name) {
  const bool beside = name.ends_with(kWeightSuffix) && tensors.modules.contains(name.substr(0, name.size() - kWeightSuffix.size()));
  if (!beside || !format::TensorFiles::are_in(model)) return false;
  const format::ModelFolder base = format::open_model_folder(model);
  const format::TensorLocation* const own = base.tensors.find(name);
  const format::TensorEntry& saved = *tensors.saved.at(name);
  if (own == nullptr || own->tensor->shape != saved.shape) return false;
  return at::equal(read_tensor(*own).to(at::kFloat), read_tensor(adapter.file, saved).to(at::kFloat));
}

}  // namespace qlorapp
