// SPDX-License-Identifier: Apache-2.0
/// A Llama-shaped causal language model with a frozen base and trainable adapters:
/// embedding → blocks → norm → chunked linear and cross-entropy. The logits of a training step never exist as a whole.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "qlorapp/format/model_config.hpp"
#include "qlorapp/nn/adapter_arena.hpp"
#include "qlorapp/nn/adapter_set.hpp"
#include "qlorapp/nn/batch.hpp"
#include "qlorapp/nn/decoder_block.hpp"
#include "qlorapp/nn/generation_cache.hpp"
#include "qlorapp/nn/keep.hpp"
#include "qlorapp/nn/lora_config.hpp"
#include "qlorapp/nn/memory_settings.hpp"
#include "qlorapp/nn/step_context.hpp"
#include "qlorapp/ops/memory_tape.hpp"

namespace qlorapp {

/// Summed loss of a batch and the number of targets it is summed over.
struct LossSum {
  at::Tensor loss;      ///< () float32 on the model's device.
  int64_t targets = 0;  ///< Host; known from the batch.
};

/// PEFT's name for an adapter that was given none.
inline constexpr const char* kDefaultAdapter = "default";

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

  /// Adds adapters to the linear layers that the config names, with values by its init_lora_weights and the seed. The first set
  /// of adapters becomes the active one; one that takes a part out of the base (PiSSA, OLoRA) must be the only one.
  /// @param source  weights from before quantization, for the initializations that decompose them.
  /// @throws ValueError if there are adapters of that name, the config matches no layer (naming those that exist), or it names a
  ///         module that cannot have what it asks for.
  void add_adapters(const LoraConfig& config, uint64_t seed, const std::string& name = kDefaultAdapter,
                    const WeightSource& source = {});
  [[nodiscard]] bool has_adapters() const { return !adapters_.empty(); }
  /// In alphabetical order.
  [[nodiscard]] std::vector<std::string> adapter_names() const;
  /// Empty where there are none.
  [[nodiscard]] const std::string& active_adapter() const { return active_; }
  void set_active_adapter(const std::string& name);
  /// If it was the active one, the first of the others becomes that. Its arena goes: nothing may hold on to it.
  void delete_adapters(const std::string& name);
  /// Of the active adapter, or of the named one. @throws ValueError naming the nearest, if there is none such.
  [[nodiscard]] AdapterSet& adapters(const std::string& name = "");
  [[nodiscard]] const AdapterSet& adapters(const std::string& name = "") const;
  [[nodiscard]] const LoraConfig& lora_config() const { return adapters().config; }
  [[nodiscard]] AdapterArena& arena() { return adapters().arena; }
  [[nodiscard]] const AdapterArena& arena() const { return adapters().arena; }
  /// Turns all adapters off (the base model) or on again.
  void enable_adapters(bool enabled);
  /// AdapterArena::adopt_parameter, and points the block that uses it at the new tensor object.
  void adopt_parameter(int64_t i, const at::Tensor& parameter, const std::string& name = "");
  /// Whether an initialization took a part out of the base: adapters then fit no other base than this one.
  [[nodiscard]] bool base_was_changed() const { return base_was_changed_; }

  /// Whether gradients have the same bits in every run on a GPU too, at the cost of a slower attention there. Off until set.
  void set_deterministic(bool deterministic) { deterministic_ = deterministic; }
  [[nodiscard]] bool deterministic() const { return deterministic_; }
  /// Whether training multiplies the frozen weights in eight bits (nn/float8_stack.hpp): faster on GPUs that can, and less exact.
  /// Batches of at most 64 tokens, evaluation and generation stay in 16 bits, as head, attention and adapters do. Off until set.
  /// @throws ValueError on a GPU in another compute dtype than bfloat16, and where a weight does not allow it, and is off then; each micro-batch on a
  ///         GPU older than sm_89, and where adapters do not allow it: with dropout, DoRA or weight_workspace=projection.
  void set_float8(bool enabled);
  [[nodiscard]] bool float8() const { return blocks_.front().in_float8(); }
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

  /// Room for `rows` rows of at most `capacity` positions each.
  [[nodiscard]] GenerationCache make_cache(int64_t rows, int64_t capacity) const;
  /// Hidden states after the last norm of the last token of each row, (R, D), or of every token, (M, D). No gradients.
  /// @param tokens  (M) int64: counts[0] tokens that follow those of cache row rows[0], then counts[1] of rows[1] …
  /// @throws ValueError if a row outgrows the capacity.
  [[nodiscard]] at::Tensor forward_cached(const at::Tensor& tokens, std::span<const int64_t> rows, std::span<const int64_t> counts,
                                          GenerationCache& cache, bool every_token = false);

  [[nodiscard]] const format::ModelConfig& config() const { return config_; }
  [[nodiscard]] std::vector<DecoderBlock>& blocks() { return blocks_; }
  [[nodiscard]] const std::vector<DecoderBlock>& blocks() const { return blocks_; }
  [[nodiscard]] const at::Tensor& embed_tokens() const { return embed_tokens_; }
  [[nodiscard]] const at::Tensor& norm_weight() const { return norm_; }
  [[nodiscard]] const at::Tensor& lm_head() const { return lm_head_; }
  /// Grown to the longest row seen so far.
  [[nodiscard]] const RopeTable& rope() const { return rope_; }
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
  void check_targets(const LoraConfig& config) const;
  void show_active_adapter();
  StepContext make_context(const Batch& batch, bool training, uint64_t seed, uint32_t micro_step);
  [[nodiscard]] at::Tensor run_segment(const Segment& segment, const at::Tensor& x, const StepContext& context,
                                       std::vector<Saved>* saved) const;
  /// Asked of the norm: the embedding may wait on the host.
  [[nodiscard]] bool on_gpu() const { return ops::computes_on_gpu(norm_); }
  [[nodiscard]] int64_t loss_chunk_rows() const;
  /// @param need_dx  whether the gradient of the segment's input is wanted.
  [[nodiscard]] Wide run_segment_back(const Segment& segment, Wide dy, const StepContext& context, std::vector<Saved> saved,
                                      const std::vector<DecoderBlock::Gradients>& gradients, bool need_dx) const;
  /// The float32 table that the active adapter trains in the place of the frozen one; undefined where it trains none.
  [[nodiscard]] at::Tensor trained_embedding() const;
  [[nodiscard]] at::Tensor trained_head() const;
  [[nodiscard]] at::Tensor embed(const at::Tensor& tokens) const;
  /// In the compute dtype; on the graph of the trained one.
  [[nodiscard]] at::Tensor head() const;

  format::ModelConfig config_;
  at::Tensor embed_tokens_, norm_, lm_head_;
  std::vector<DecoderBlock> blocks_;
  std::vector<Segment> segments_;
  MemorySettings memory_;
  RopeTable rope_;
  std::shared_ptr<PinnedRing> ring_;  ///< Of inputs on the host; null while no segment asks for it.
  std::map<std::string, AdapterSet> adapters_;
  std::string active_;
  bool adapters_enabled_ = true;
  bool deterministic_ = false;
  bool base_was_changed_ = false;
};

}  // namespace qlorapp
