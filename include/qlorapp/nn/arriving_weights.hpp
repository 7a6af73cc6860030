// SPDX-License-Identifier: Apache-2.0
/// Which tensor of a checkpoint becomes which weight, and how: the one arrangement of those who load a model (io/load_model.hpp) and
/// those who plan how much memory that takes (memory/planner.hpp).
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "qlorapp/nn/causal_lm.hpp"
#include "qlorapp/quant/arrival.hpp"
#include "qlorapp/quant/quantizer.hpp"

namespace qlorapp {

struct WeightOptions {
  at::ScalarType compute_dtype = at::kFloat;  ///< Of activations, norms, embeddings and head: float32, bfloat16 or float16.
  bool load_in_4bit = true;                   ///< false keeps the linear layers dense in the compute dtype.
  Quantizer::Options quantization;            ///< For a checkpoint that is not quantized yet.
  std::vector<std::string> skip_modules;      ///< Linear layers left dense: full names or trailing parts ("down_proj").
  at::Device device = at::kCPU;
  /// The embedding table goes straight to pinned host memory (nn/memory_settings.hpp); nothing on a CPU and where the head is tied to
  /// it.
  bool embedding_on_host = false;
};

/// What a checkpoint is asked.
struct StoredWeights {
  /// Dtype of a dense tensor of this shape. @throws FormatError if there is none such.
  std::function<at::ScalarType(const std::string& name, const std::vector<int64_t>& shape)> dtype;
  /// Whether a weight is stored in four bits.
  std::function<bool(const std::string& name)> is_quantized;
  /// Brings such a one: complete when all has arrived.
  std::function<QuantizedTensor(const std::string& name, const std::vector<int64_t>& shape)> bring_quantized;
  /// Brings a dense one.
  std::function<void(const std::string& name, const std::vector<int64_t>& shape, Arrival arrival)> bring;
};

/// Places for all weights, and orders for all tensors. Where weights are quantized as they come, their layers are empty until they have.
/// Other layers of `weights.blocks` must not be added or moved out until then.
[[nodiscard]] CausalLM::Weights arrange_weights(const format::ModelConfig& config, const WeightOptions& options,
                                                const StoredWeights& checkpoint);

/// Whether one of the names is the module's or its trailing part, cut at a dot.
[[nodiscard]] bool names_module(const std::vector<std::string>& names, const std::string& module);

}  // namespace qlorapp
