// SPDX-License-Identifier: Apache-2.0
/// Settings of a model's step: activations kept for backward, memory options, fp8, determinism.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "qlorapp/nn/keep.hpp"
#include "qlorapp/nn/memory_settings.hpp"

namespace qlorapp {

struct Batch;
class Decoder;
class InputSquares;
class PinnedRing;
struct StepContext;

class StepSettings {
 public:
  /// All blocks keep everything, in 16 bits or float32.
  explicit StepSettings(std::shared_ptr<Decoder> decoder);

  /// Activations kept for backward. @throws ValueError unless the segments cover the blocks in order.
  void set_segments(std::vector<Segment> segments);
  [[nodiscard]] const std::vector<Segment>& segments() const { return segments_; }
  /// Host memory of segments with input_on_host; null where there are none, and on a CPU.
  [[nodiscard]] const PinnedRing* pinned_ring() const { return ring_.get(); }

  /// Takes effect with the next micro-batch; embedding_on_host and base_on_host move weights at once (Decoder).
  /// @throws ValueError if a setting is out of range.
  void set_memory(const MemorySettings& settings);
  [[nodiscard]] const MemorySettings& memory() const { return memory_; }
  /// Rows of logits that exist at a time.
  [[nodiscard]] int64_t loss_chunk_rows() const;

  /// Whether training multiplies the frozen weights in eight bits (nn/float8_stack.hpp): faster on GPUs that can, and less exact.
  /// Batches of at most 64 tokens, evaluation and generation stay in 16 bits, as head, attention and adapters do. Off until set.
  /// @throws ValueError on a GPU in another compute dtype than bfloat16, and where a weight does not allow it, and is off then; each
  ///         micro-batch on a GPU older than sm_89, and where adapters do not allow it: with dropout, DoRA or
  ///         weight_workspace=projection.
  void set_float8(bool enabled);
  [[nodiscard]] bool float8() const;

  /// Whether gradients have the same bits in every run on a GPU too, at the cost of a slower attention there. Off until set.
  void set_deterministic(bool deterministic) { deterministic_ = deterministic; }
  [[nodiscard]] bool deterministic() const { return deterministic_; }

  /// Whether forward_backward() gives LossSum::statistics: a GPU reads the logits once more. Off until set.
  void set_token_statistics(bool wanted) { token_statistics_ = wanted; }
  [[nodiscard]] bool token_statistics() const { return token_statistics_; }

  /// What sees the inputs of linear layers from the next batch on; null: nothing does.
  void observe(std::shared_ptr<InputSquares> squares) { squares_ = std::move(squares); }

  /// Of a micro-batch.
  [[nodiscard]] StepContext context(const Batch& batch, bool training, uint64_t seed, uint32_t micro_step) const;

 private:
  std::shared_ptr<Decoder> decoder_;
  std::vector<Segment> segments_;
  MemorySettings memory_;
  std::shared_ptr<PinnedRing> ring_;  ///< Of inputs on the host; null while no segment asks for it.
  std::shared_ptr<InputSquares> squares_;
  bool deterministic_ = false;
  bool token_statistics_ = false;
};

}  // namespace qlorapp
