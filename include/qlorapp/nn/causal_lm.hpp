// SPDX-License-Identifier: Apache-2.0
/// A Llama-shaped causal language model with a frozen base and trainable adapters:
/// embedding → blocks → norm → chunked linear and cross-entropy. The logits of a training step never exist as a whole.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "qlorapp/format/model_config.hpp"
#include "qlorapp/nn/adapter_arena.hpp"
#include "qlorapp/nn/batch.hpp"
#include "qlorapp/nn/decoder_block.hpp"
#include "qlorapp/nn/keep.hpp"
#include "qlorapp/nn/lora_config.hpp"
#include "qlorapp/nn/memory_settings.hpp"
#include "qlorapp/nn/step_context.hpp"

namespace qlorapp {

/// Summed loss of a batch and the number of targets it is summed over.
struct LossSum {
  at::Tensor loss;      ///< () float32 on the model's device.
  int64_t targets = 0;  ///< Host; known from the batch.
};

/// One that a shared_ptr owns is kept alive by the graphs of its losses; any other must outlive them.
class CausalLM : public std::enable_shared_from_this<CausalLM> {
 public:
  struct Weights {
    at::Tensor embed_tokens;  ///< (V, D), compute dtype.
    at::Tensor norm;          ///< (D), compute dtype.
    at::Tensor lm_head;       ///< (V, D); the same tensor as embed_tokens when the config ties them.
    std::vector<DecoderBlock::Weights> blocks;
  };

  /// @throws ValueError if a weight contradicts the config.
  CausalLM(format::ModelConfig config, Weights weights);

  /// Adds adapters to the linear layers that the config names: A random (seeded), B zero, as PEFT initializes them.
  /// @throws ValueError if there are adapters already, or the config matches no layer (naming those that exist).
  void add_adapters(const LoraConfig& config, uint64_t seed);
  [[nodiscard]] bool has_adapters() const { return arena_.size() > 0; }
  [[nodiscard]] const LoraConfig& lora_config() const { return lora_config_; }
  /// Turns all adapters off (the base model) or on again.
  void enable_adapters(bool enabled);
  [[nodiscard]] AdapterArena& arena() { return arena_; }
  [[nodiscard]] const AdapterArena& arena() const { return arena_; }
  /// AdapterArena::adopt_parameter, and points the block that uses it at the new tensor object.
  void adopt_parameter(int64_t i, const at::Tensor& parameter);

  /// Whether gradients have the same bits in every run on a GPU too, at the cost of a slower attention there. Off until set.
  void set_deterministic(bool deterministic) { deterministic_ = deterministic; }
  /// What is kept for backward; all blocks `everything` until set. @throws ValueError unless the segments cover the blocks in
  /// order.
  void set_segments(std::vector<Segment> segments);
  [[nodiscard]] const std::vector<Segment>& segments() const { return segments_; }
  /// Where the step buys memory with time; takes effect with the next micro-batch. embedding_on_host moves the table at once: the tensor
  /// that embed_tokens() gave before stays where it is as long as somebody holds it.
  /// @throws ValueError if a setting is out of range.
  void set_memory(const MemorySettings& settings);
  [[nodiscard]] const MemorySettings& memory() const { return memory_; }
  /// Host memory of segments with input_on_host; null where there are none, and on a CPU.
  [[nodiscard]] const PinnedRing* pinned_ring() const { return ring_.get(); }

  /// Forward and backward of one micro-batch; adapter gradients are added to the arena. No autograd, no host synchronization.
  /// @param batch       on the model's device, at least one token.
  /// @param grad_scale  () float32: factor on the gradient of the summed loss (loss scale over the window's target count).
  /// @param seed, micro_step  key of the dropout masks.
  LossSum forward_backward(const Batch& batch, const at::Tensor& grad_scale, uint64_t seed, uint32_t micro_step);

  /// The summed loss on an autograd graph whose leaves are the arena's parameters. () float32.
  [[nodiscard]] at::Tensor loss(const Batch& batch, uint64_t seed, uint32_t micro_step);
  /// The same from what hidden_states() returned for the batch.
  [[nodiscard]] at::Tensor loss_of(const at::Tensor& hidden, const Batch& batch) const;

  /// Hidden states after the last norm, (M, D). Differentiable with respect to the adapters when gradients are enabled.
  [[nodiscard]] at::Tensor hidden_states(const Batch& batch, bool training, uint64_t seed, uint32_t micro_step);
  /// (rows, V) of the head, in the compute dtype, for hidden states (rows, D).
  [[nodiscard]] at::Tensor logits(const at::Tensor& hidden) const;

  /// One cache a block for a row of at most `capacity` positions.
  [[nodiscard]] std::vector<KeyValueCache> make_cache(int64_t capacity) const;
  /// Hidden state of the last of `tokens` ((n) int64), which follow those in the cache. (1, D). No gradients.
  [[nodiscard]] at::Tensor forward_cached(const at::Tensor& tokens, std::vector<KeyValueCache>& cache);

  [[nodiscard]] const format::ModelConfig& config() const { return config_; }
  [[nodiscard]] std::vector<DecoderBlock>& blocks() { return blocks_; }
  [[nodiscard]] const std::vector<DecoderBlock>& blocks() const { return blocks_; }
  [[nodiscard]] const at::Tensor& embed_tokens() const { return embed_tokens_; }
  [[nodiscard]] const at::Tensor& norm_weight() const { return norm_; }
  [[nodiscard]] const at::Tensor& lm_head() const { return lm_head_; }
  [[nodiscard]] at::Device device() const { return norm_.device(); }
  [[nodiscard]] at::ScalarType dtype() const { return embed_tokens_.scalar_type(); }
  /// Elements of the base model (tied weights once) and of the adapters.
  [[nodiscard]] int64_t base_parameter_count() const;
  /// Of the base, on its device; an embedding in host memory is not counted.
  [[nodiscard]] Bytes weight_bytes() const;

  /// Names of the linear layers in the order of the model, without prefix: "model.layers.0.self_attn.q_proj".
  [[nodiscard]] std::vector<std::string> linear_names() const;

 private:
  friend struct SegmentFunction;
  void bind_adapters();
  StepContext make_context(const Batch& batch, bool training, uint64_t seed, uint32_t micro_step);
  [[nodiscard]] at::Tensor run_segment(const Segment& segment, const at::Tensor& x, const StepContext& context,
                                       std::vector<Saved>* saved) const;
  [[nodiscard]] int64_t loss_chunk_rows() const;
  [[nodiscard]] Wide run_segment_back(const Segment& segment, Wide dy, const StepContext& context, std::vector<Saved> saved,
                                      const std::vector<DecoderBlock::Gradients>& gradients) const;

  format::ModelConfig config_;
  at::Tensor embed_tokens_, norm_, lm_head_;
  std::vector<DecoderBlock> blocks_;
  std::vector<Segment> segments_;
  MemorySettings memory_;
  RopeTable rope_;
  std::shared_ptr<PinnedRing> ring_;  ///< Of inputs on the host; null while no segment asks for it.
  LoraConfig lora_config_;
  AdapterArena arena_;
  /// Where in the arena each block's adapters are: index of A (B follows it), or -1.
  std::vector<std::array<int64_t, kProjectionCount>> adapter_index_;
  bool adapters_enabled_ = true;
  bool deterministic_ = false;
};

}  // namespace qlorapp
