// SPDX-License-Identifier: Apache-2.0
/// A causal language model of a native family (format/family.hpp) with a frozen base and trainable adapters:
/// embedding → blocks → norm → chunked linear and cross-entropy. The logits of a training step never exist as a whole.
///
///     decoder()   the frozen base: weights, blocks, where they are and how large (src/nn/decoder.hpp)
///     adapters()  what is trained (adapter_registry.hpp)
///     settings()  what a step may keep and use (step_settings.hpp)
///
/// Generation is in generate.hpp.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "qlorapp/adapters/adapter_arena.hpp"
#include "qlorapp/format/model_config.hpp"
#include "qlorapp/nn/adapter_registry.hpp"
#include "qlorapp/nn/batch.hpp"
#include "qlorapp/nn/micro_step.hpp"
#include "qlorapp/nn/step_settings.hpp"

namespace qlorapp {

class DecoderBlock;
struct DecoderWeights;

class CausalLM {
 public:
  /// @throws ValueError if a weight contradicts the config.
  CausalLM(format::ModelConfig config, DecoderWeights weights);
  CausalLM(CausalLM&&) = default;
  CausalLM& operator=(CausalLM&&) = default;

  [[nodiscard]] Decoder& decoder() { return *decoder_; }
  [[nodiscard]] const Decoder& decoder() const { return *decoder_; }
  [[nodiscard]] AdapterRegistry& adapters() { return adapters_; }
  [[nodiscard]] const AdapterRegistry& adapters() const { return adapters_; }
  [[nodiscard]] StepSettings& settings() { return settings_; }
  [[nodiscard]] const StepSettings& settings() const { return settings_; }

  /// Forward and backward of one micro-batch; adapter gradients are added to the arena. No autograd, no host synchronization.
  /// @param batch       on the model's device, at least one token.
  /// @param grad_scale  () float32: factor on the gradient of the summed loss (loss scale over the window's target count).
  /// @param key         of the dropout masks.
  /// @param done        may be empty.
  /// @throws ValueError without adapters or tokens.
  LossSum forward_backward(const Batch& batch, const at::Tensor& grad_scale, StepKey key, const BlockDone& done = {});

  /// The summed loss on an autograd graph whose leaves are the arena's parameters. () float32.
  [[nodiscard]] at::Tensor loss(const Batch& batch, uint64_t seed, uint32_t micro_step);
  /// The same from what hidden_states() returned for the batch.
  [[nodiscard]] at::Tensor loss_of(const at::Tensor& hidden, const Batch& batch) const;
  /// Hidden states after the last norm, (M, D). Differentiable with respect to the adapters when gradients are enabled.
  [[nodiscard]] at::Tensor hidden_states(const Batch& batch, bool training, uint64_t seed, uint32_t micro_step);
  /// (rows, V) of the head, in the compute dtype, for hidden states (rows, D).
  [[nodiscard]] at::Tensor logits(const at::Tensor& hidden) const;

  // In short: the parts' own functions.
  void add_adapters(const LoraConfig& config, uint64_t seed, const std::string& name = kDefaultAdapter,
                    const WeightSource& source = {}) {
    adapters_.add(config, seed, name, source);
  }
  /// Of the active adapter.
  [[nodiscard]] AdapterArena& arena();
  [[nodiscard]] const AdapterArena& arena() const;
  [[nodiscard]] const LoraConfig& lora_config() const;
  [[nodiscard]] const format::ModelConfig& config() const;
  [[nodiscard]] std::vector<DecoderBlock>& blocks();
  [[nodiscard]] const std::vector<DecoderBlock>& blocks() const;
  [[nodiscard]] at::Device device() const;
  [[nodiscard]] at::ScalarType dtype() const;

 private:
  std::shared_ptr<Decoder> decoder_;  ///< Shared with its parts and with the graphs of losses.
  AdapterRegistry adapters_;
  StepSettings settings_;
};

}  // namespace qlorapp
