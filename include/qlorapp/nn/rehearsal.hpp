// SPDX-License-Identifier: Apache-2.0
/// What a micro-batch needs on a GPU, to the byte and before anything exists: the training step itself, run on tensors that
/// have shapes and no bytes (nn/memory_account.hpp). Every setting, mixture of policies and later change of the code is in the
/// answer by construction.
///
/// In it are the base, the adapters with their gradients, the batch, the rotary tables, and all that forward, loss and backward
/// allocate in torch's allocator. Not in it: the optimizer's state (train/), what cuBLAS keeps for itself (torch's allocator
/// serves it: 32 MiB on Hopper, 8 MiB before), the CUDA context, and memory that is cached but free.
#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "qlorapp/core/units.hpp"
#include "qlorapp/format/model_config.hpp"
#include "qlorapp/nn/keep.hpp"
#include "qlorapp/nn/lora_config.hpp"
#include "qlorapp/nn/memory_settings.hpp"

namespace qlorapp {

class CausalLM;

struct RehearsalOptions {
  at::ScalarType dtype = at::ScalarType::BFloat16;
  int64_t rows = 1;               ///< Of the micro-batch.
  int64_t length = 2048;          ///< Tokens of each.
  int64_t targets_of_row = -1;    ///< Tokens with a label; -1: all but the one that nothing predicts.
  std::vector<Segment> segments;  ///< What is kept; empty: everything.
  MemorySettings memory;
  bool load_in_4bit = true;  ///< Else the linear layers are dense.
  bool double_quant = true;
  int64_t block_size = 64;
  int64_t nested_block_size = 256;
};

struct Rehearsal {
  Bytes weights;   ///< The base, on the GPU.
  Bytes adapters;  ///< Values and gradients, float32.
  /// The most in each phase, all of the above included.
  Bytes forward, loss, backward;
  Bytes pinned;  ///< Host memory beside it: an embedding and inputs that wait there.

  [[nodiscard]] Bytes peak() const;
};

/// A model whose tensors are all on the device "meta": no bytes, no values.
[[nodiscard]] CausalLM make_meta_model(const format::ModelConfig& config, const RehearsalOptions& options);

/// Takes milliseconds, whatever the model's size. @throws ValueError if the options do not fit the model.
[[nodiscard]] Rehearsal rehearse(const format::ModelConfig& config, const LoraConfig& lora, const RehearsalOptions& options);

}  // namespace qlorapp
