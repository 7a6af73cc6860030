// SPDX-License-Identifier: Apache-2.0
/// QLoRA for a torch::nn model of your own, with one call.
///
///     struct Mlp : torch::nn::Module {
///       Mlp() : up(register_module("up", LoraLinearModule(64, 256))), down(register_module("down", LoraLinearModule(256, 64))) {}
///       at::Tensor forward(const at::Tensor& x) { return down(at::gelu(up(x))); }
///       LoraLinearModule up, down;
///     };
///     auto model = std::make_shared<Mlp>();          // plain layers: load or train its weights
///     inject(*model, LoraConfig{.r = 16}, seed);     // the base in four bits, frozen; adapters as parameters
///     save_adapter(adapter_parameters(*model), config, "adapter", "my-model");    // io/adapter.hpp
///
/// LibTorch's own Linear is called directly and cannot be given another forward: layers that are to be adapted are declared as
/// LoraLinearModule, which is a plain linear layer until then.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/module.h>

#include "qlorapp/adapters/lora_config.hpp"
#include "qlorapp/quant/quantizer.hpp"

namespace qlorapp {

struct InjectOptions {
  bool load_in_4bit = true;  ///< false leaves the weights dense, in their dtype.
  Quantizer::Options quantization = {};
};

/// Turns every plain LoraLinearModule of the model that the config targets into a frozen, quantized weight with an adapter, and freezes
/// all other parameters but those of modules_to_save. target_modules are ends of the modules' names; "all-linear", and none given, is
/// every such layer. Ranks, scalings, initial values (by name and seed) and patterns are PEFT's (adapters/lora_config.hpp).
/// @returns the names of the adapted modules, in their order. Synchronizes.
/// @throws ValueError naming the rule if no layer matches, a target is a torch::nn::Linear or has an adapter already, or a config value
///         is out of range. The model is unchanged then.
std::vector<std::string> inject(torch::nn::Module& model, const LoraConfig& config, uint64_t seed,
                                const InjectOptions& options = {});

/// The parameters that PEFT saves: those of adapters and those that modules_to_save left trainable, under their names.
[[nodiscard]] std::vector<std::pair<std::string, at::Tensor>> adapter_parameters(const torch::nn::Module& model);

}  // namespace qlorapp
