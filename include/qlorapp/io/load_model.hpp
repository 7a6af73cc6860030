// SPDX-License-Identifier: Apache-2.0
/// A Hugging Face model folder becomes a CausalLM, piece by piece (tensor_stream.hpp): at no moment is more in memory than the
/// quantized model, the scales of a weight and the file buffers (192 MiB pinned and 16 MiB on a GPU; 1 MiB a thread on a CPU).
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "qlorapp/nn/causal_lm.hpp"
#include "qlorapp/nn/weight_options.hpp"

namespace qlorapp {

struct LoadOptions : WeightOptions {
  /// Called after each tensor with the number done and the number there are. May be empty.
  std::function<void(int64_t done, int64_t total)> progress;
};

/// Reads config.json and the safetensors files beside it. A folder that bitsandbytes quantized keeps its very codes.
/// The head and the embeddings are never quantized; with tie_word_embeddings they are one tensor.
/// @throws FormatError, IoError naming the file and tensor: an unknown architecture, a shard that is missing or truncated, a tensor
///         that is missing or has the wrong shape, a weight that is not finite.
[[nodiscard]] CausalLM load_model(const std::string& folder, const LoadOptions& options);

/// Reads a folder, quantizes its linear layers, and writes a folder that transformers and vLLM load as a bitsandbytes checkpoint:
/// model.safetensors, config.json with quantization_config, tokenizer and generation files as they are.
/// @throws FormatError, IoError as load_model(). @throws ValueError if `output` exists and is not empty, or the input is quantized already.
void quantize_checkpoint(const std::string& folder, const std::string& output, const Quantizer::Options& options,
                         at::ScalarType compute_dtype, const std::function<void(int64_t done, int64_t total)>& progress = {});

}  // namespace qlorapp
