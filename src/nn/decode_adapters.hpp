// SPDX-License-Identifier: Apache-2.0
/// An adapter as passes of few tokens read it: in the dtype of the computation, and what of it depends on its values alone formed once.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

#include "qlorapp/adapters/lora_adapter.hpp"

namespace qlorapp {

class CausalLM;

struct DecodeAdapter {
  at::Tensor a, b;  ///< (r, in), (out, r).
  double scaling = 1;
  at::Tensor scale;  ///< (out) float32: DoRA's factor of the sum; undefined: none.
};

/// The matrices A of layers that share an input.
struct JoinedInputs {
  int64_t rank = 0;      ///< Σ r.
  bool together = true;  ///< They follow each other in memory.
  bool scaled = false;   ///< Some layer has a DecodeAdapter::scale.
  at::Tensor a;          ///< (Σ r, in); undefined where they are not together, or there are none.

  [[nodiscard]] static JoinedInputs of(std::span<const std::optional<DecodeAdapter>> adapters);
};

class DecodeAdapters {
 public:
  using OfBlock = std::vector<std::optional<DecodeAdapter>>;  ///< Of each linear layer.

  /// Of the active adapter. Null where the model computes without one, or where parameters have memory of their own, which a user gave them.
  [[nodiscard]] static std::shared_ptr<DecodeAdapters> of(const CausalLM& model);

  /// Whether they are still those that the model computes with; false, too, where memory of a parameter is another.
  [[nodiscard]] bool are_of(const CausalLM& model) const;
  /// Takes the values that the adapter has now, into the same memory.
  void refresh(const CausalLM& model);
  [[nodiscard]] const OfBlock& block(int64_t index) const { return blocks_[static_cast<size_t>(index)]; }

 private:
  const void* source_ = nullptr;  ///< The adapter set.
  at::Tensor values_;             ///< Of all A and B.
  std::vector<OfBlock> blocks_;
};

}  // namespace qlorapp
