// SPDX-License-Identifier: Apache-2.0
/// LoraLinear as a torch::nn::Module: a layer of a model of your own, where a torch::nn::Linear would stand.
///
///     LoraLinearModule up(FrozenWeight(Quantizer().quantize(weight)), LoraLinear::Options{.r = 16}, seed);
///     register_module("up", up);
///
/// Or as a plain layer, whose "up.weight" and "up.bias" are loaded or trained like those of a torch::nn::Linear, until one call gives
/// all such layers of a model a frozen base and adapters (nn/inject.hpp):
///
///     LoraLinearModule up(64, 256);
///
/// train(), eval(), to(device), named_parameters() ("up.lora_A.weight", "up.lora_B.weight", PEFT's names), torch::save and
/// torch::load of the enclosing module reach it. The frozen base is registered as buffers, so a saved module holds every number
/// that its output depends on.
///
/// A header of its own: torch/nn/module.h is slow to compile.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <optional>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "qlorapp/nn/lora_linear.hpp"

namespace qlorapp {

class LoraLinearModuleImpl : public torch::nn::Module {
 public:
  /// A plain layer, y = x·Wᵀ + bias: weight (out, in) and bias (out), float32, drawn as torch::nn::Linear draws them.
  /// @throws ValueError unless both sizes are at least 1.
  LoraLinearModuleImpl(int64_t in_features, int64_t out_features, bool bias = true);
  /// As LoraLinear's.
  LoraLinearModuleImpl(FrozenWeight base, const LoraLinear::Options& options, uint64_t seed, at::Tensor bias = {});

  /// @param x  (…, in).  @returns (…, out) in the dtype of x; dropout is on while is_training(). Does not synchronize.
  [[nodiscard]] at::Tensor forward(const at::Tensor& x);

  /// Whether this is a plain layer still.
  [[nodiscard]] bool is_plain() const { return !layer_.has_value(); }
  /// The trainable weight and bias of a plain layer; undefined afterwards.
  [[nodiscard]] const at::Tensor& weight() const { return weight_; }
  [[nodiscard]] const at::Tensor& bias() const { return bias_; }
  /// Turns a plain layer into this one: "weight" and "bias" are no parameters any more. @throws ValueError unless is_plain().
  void adapt(LoraLinear layer);

  /// Only a dense base and the bias have a dtype to convert: codes are bytes, and A and B stay float32.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;

  /// @throws ValueError if the layer is merged, or if the archive holds a weight of another kind. The layer is unusable then.
  void load(torch::serialize::InputArchive& archive) override;
  void pretty_print(std::ostream& stream) const override;

  /// The layer: merge(), unmerge(), scaling(), a(), b(), base(). @throws ValueError if this is a plain one.
  [[nodiscard]] LoraLinear& layer();
  [[nodiscard]] const LoraLinear& layer() const;

 private:
  void hold_layer();

  at::Tensor weight_, bias_;         ///< Of a plain layer.
  std::optional<LoraLinear> layer_;  ///< Unset while plain.
  at::Tensor geometry_;              ///< int64: shape and quantization of the base. A buffer, so that load() refuses another kind.
};

TORCH_MODULE(LoraLinearModule);

}  // namespace qlorapp
