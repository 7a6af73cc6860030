// SPDX-License-Identifier: Apache-2.0
/// A base and its adapter become one plain checkpoint, tensor by tensor: nothing of the model's size is ever in memory.
///
/// In memory is one weight at a time, as it is stored and in float32 (adapters/merged_weight.hpp), with the adapter's two matrices for it;
/// what has no adapter goes through a buffer of 1 MiB. memory/planner.hpp states the bytes as the phase "merge".
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include "qlorapp/core/units.hpp"
#include "qlorapp/quant/quantizer.hpp"

namespace qlorapp {

/// Which W an adapter is merged into.
enum class MergeBase : uint8_t {
  kOriginal,     ///< The checkpoint's own, which training saw through its quantization error only. PEFT's choice.
  kDequantized,  ///< Training's weights: quantized and dequantized. The merged model computes the same as base and adapter.
};

/// "original" or "dequantized".
[[nodiscard]] std::string_view to_string(MergeBase base);
/// @throws ValueError with both words.
[[nodiscard]] MergeBase parse_merge_base(std::string_view text);

struct MergeOptions {
  /// Unless given: the original weights where the checkpoint has them, else (it is stored in four bits) what they dequantize to.
  std::optional<MergeBase> base;
  /// Of the written weights: float32, bfloat16 or float16; unless given each tensor's own, and config.json's for weights in four bits.
  std::optional<at::ScalarType> dtype;
  /// Training's options, for MergeBase::kDequantized of a checkpoint that is not stored in four bits.
  Quantizer::Options quantization;
  std::vector<std::string> skip_modules;                      ///< Linear layers that training left dense.
  Bytes max_shard_size{5'000'000'000};                        ///< Of a file of weights; one tensor may be larger.
  std::function<void(int64_t done, int64_t total)> progress;  ///< Called after each tensor. May be empty.
};

/// Reads a Hugging Face folder of any family, dense or stored in four bits, and a PEFT folder, and writes a dense Hugging Face folder:
/// safetensors in shards with their index, config.json without quantization_config, tokenizer and generation files as they are. It appears
/// whole or not at all. LoRA with its patterns, rsLoRA, DoRA, lora_bias, matrices on embedding and head, modules_to_save and resized tables
/// are merged, by names and shapes (docs/formats/adapter.md); other tensors are copied. A tied head that an adapter has parted from its
/// embedding is written as a tensor of its own, with tie_word_embeddings false; so is one that a config.json with true denies. An adapter that began from the error of quantizing
/// (init_lora_weights="loftq") belongs to MergeBase::kDequantized, which adapter_config.json does not say.
/// @throws ValueError if `output` is not empty, the base asked for is not there (MergeBase::kDequantized of a float base needs a family that
///         the engine computes), or the adapter belongs to another; FormatError, IoError naming file and tensor: as load_adapter, experts in
///         one tensor, a name that fits two tensors, a merged value that dtype cannot hold. Nothing is left behind.
void merge_adapter(const std::string& model, const std::string& adapter, const std::string& output,
                   const MergeOptions& options = {});

/// How far a merged folder's logits are from those of the four-bit base with its adapter, both in float32.
struct LogitDrift {
  int64_t tokens = 0;         ///< Of the prompt.
  double largest_logit = 0;   ///< In magnitude, of the base with its adapter.
  double largest_change = 0;  ///< In magnitude.
  int64_t same_choice = 0;    ///< Tokens after which both call the same token the most probable.
};

/// On a fixed prompt of at most 32 tokens over the vocabulary. Loads both models, one after the other.
/// @param options  of the quantization, as for merge_adapter.
[[nodiscard]] LogitDrift measure_drift(const std::string& model, const std::string& adapter, const std::string& merged,
                                       const MergeOptions& options, at::Device device);

}  // namespace qlorapp
