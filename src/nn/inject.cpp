// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/nn/inject.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <memory>
#include <set>
#include <string>
#include <utility>

#include "adapters/adapter_init.hpp"
#include "core/check.hpp"
#include "qlorapp/nn/lora_linear_module.hpp"

namespace qlorapp {
namespace {

/// Of every module that may be named: a config without target_modules means all.
bool is_target(const LoraConfig& config, const std::string& name) {
  return config.target_modules.empty() || config.matches(name, /*output_head=*/"");
}

LoraLinear adapted(const LoraLinearModuleImpl& plain, const std::string& name, const LoraConfig& config, uint64_t seed,
                   const InjectOptions& options) {
  const at::NoGradGuard no_grad;
  const LoraInit init = config.init();
  const at::Tensor weight = plain.weight().detach();
  FrozenWeight base = options.load_in_4bit ? FrozenWeight(Quantizer(options.quantization).quantize(weight)) : FrozenWeight(weight);
  const LoraLinear::Options layer_options{.r = config.rank_of(name),
                                          .lora_alpha = config.alpha_of(name),
                                          .lora_dropout = config.lora_dropout,
                                          .use_rslora = config.use_rslora,
                                          .use_dora = config.use_dora};
  const at::Tensor bias = plain.bias().defined() ? plain.bias().detach() : at::Tensor();
  const LoraLinear first(base, layer_options, seed, bias);
  if (init != LoraInit::kOlora && init != LoraInit::kPissa && init != LoraInit::kLoftq) {
    initialize_adapter(first.adapter(), config, name, seed);
    return first;
  }
  FrozenWeight rest = initialize_adapter_from_weight(first.adapter(), config, name, base, weight.to(at::kFloat), seed);
  LoraLinear layer(std::move(rest), layer_options, seed, bias);  // its magnitudes are of what remains of the base
  layer.a().detach().copy_(first.a());
  layer.b().detach().copy_(first.b());
  return layer;
}

}  // namespace

std::vector<std::string> inject(torch::nn::Module& model, const LoraConfig& config, uint64_t seed, const InjectOptions& options) {
  config.validate();
  std::vector<std::pair<std::string, std::shared_ptr<LoraLinearModuleImpl>>> targets;
  std::vector<std::string> layers;
  for (const auto& item : model.named_modules(/*name_prefix=*/std::string(), /*include_self=*/false)) {
    const std::string& name = item.key();
    const bool is_torchs = item.value()->name() == "torch::nn::LinearImpl";
    const auto layer = std::dynamic_pointer_cast<LoraLinearModuleImpl>(item.value());
    if (layer || is_torchs) layers.push_back(name);
    if (config.saves(name) || !is_target(config, name)) continue;
    QLORAPP_CHECK_VALUE(!is_torchs || config.target_modules.empty() || config.targets_all_linear(),
                        "[inject] '{}' is a torch::nn::Linear, whose forward cannot be replaced. Declare it as "
                        "qlorapp::LoraLinearModule(in, out), which is a plain linear layer until inject().",
                        name);
    if (!layer) continue;
    QLORAPP_CHECK_VALUE(layer->is_plain(),
                        "[inject] '{}' has an adapter already. Make the model anew, or leave it out of target_modules.", name);
    targets.emplace_back(name, layer);
  }
  QLORAPP_CHECK_VALUE(!targets.empty(),
                      "[inject] target_modules names no LoraLinearModule of this model; its linear layers are {}.", layers);
  std::vector<LoraLinear> made;  // all of them before the first is put in: an error changes nothing
  for (const auto& [name, module] : targets) made.push_back(adapted(*module, name, config, seed, options));
  for (const auto& item : model.named_parameters()) {
    const size_t dot = item.key().rfind('.');
    const std::string owner = dot == std::string::npos ? std::string() : item.key().substr(0, dot);
    item.value().set_requires_grad(config.saves(owner));
  }
  std::vector<std::string> names;
  for (size_t i = 0; i < targets.size(); ++i) {
    targets[i].second->adapt(std::move(made[i]));
    names.push_back(targets[i].first);
  }
  return names;
}

std::vector<std::pair<std::string, at::Tensor>> adapter_parameters(const torch::nn::Module& model) {
  std::set<std::string> names;  // of adapters, frozen ones included
  for (const auto& item : model.named_modules(/*name_prefix=*/std::string(), /*include_self=*/false)) {
    const auto* const layer = dynamic_cast<const LoraLinearModuleImpl*>(item.value().get());
    if (layer == nullptr || layer->is_plain()) continue;
    for (const auto& [name, tensor] : layer->layer().named_parameters(item.key())) names.insert(name);
  }
  std::vector<std::pair<std::string, at::Tensor>> named;
  for (const auto& item : model.named_parameters()) {
    if (item.value().requires_grad() || names.contains(item.key())) named.emplace_back(item.key(), item.value());
  }
  return named;
}

}  // namespace qlorapp
