// SPDX-License-Identifier: Apache-2.0
/// LoraLinear as a torch::nn::Module: a layer of a model of your own, where a torch::nn::Linear would stand.
///
///     LoraLinearModule up(FrozenWeight(Quantizer().quantize(weight)), LoraLinear::Options{.r = 16}, seed);
///     register_module("up", up);
///
/// train(), eval(), to(device), named_parameters() ("up.lora_A.weight", "up.lora_B.weight", PEFT's names), torch::save and
/// torch::load of the enclosing module reach it. The frozen base is registered as buffers, so a saved module holds every number
/// that its output depends on.
///
/// A header of its own: torch/nn/module.h is slow to compile.
#pragma once

#include <cstdint>
#include <iosfwd>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "qlorapp/nn/lora_linear.hpp"

namespace qlorapp {

class LoraLinearModuleImpl : public torch::nn::Module {
 public:
  /// As LoraLinear's.
  LoraLinearModuleImpl(FrozenWeight base, const LoraLinear::Options& options, uint64_t seed, at::Tensor bias = {});

  /// @param x  (…, in).  @returns (…, out) in the dtype of x; dropout is on while is_training(). Does not synchronize.
  [[nodiscard]] at::Tensor forward(const at::Tensor& x) { return layer_.forward(x, is_training()); }

  /// Only a dense base and the bias have a dtype to convert: codes are bytes, and A and B stay float32.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;

  /// @throws ValueError if the layer is merged, or if what was read is not a weight of this layer's kind: the layer is unusable then.
  void load(torch::serialize::InputArchive& archive) override;
  void pretty_print(std::ostream& stream) const override;

  /// The layer: merge(), unmerge(), scaling(), a(), b(), base().
  [[nodiscard]] LoraLinear& layer() { return layer_; }
  [[nodiscard]] const LoraLinear& layer() const { return layer_; }

 private:
  LoraLinear layer_;
  at::Tensor geometry_;  ///< int64: what a quantized base's numbers mean; as a buffer, so that a file of another kind is refused.
};

TORCH_MODULE(LoraLinearModule);

}  // namespace qlorapp
