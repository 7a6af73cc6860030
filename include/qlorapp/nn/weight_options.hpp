// SPDX-License-Identifier: Apache-2.0
/// How the weights of a checkpoint are to be held.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "qlorapp/quant/quantizer.hpp"

namespace qlorapp {

class Communicator;

struct WeightOptions {
  at::ScalarType compute_dtype = at::kFloat;  ///< Of activations, norms, embeddings and head: float32, bfloat16 or float16.
  bool load_in_4bit = true;                   ///< false keeps the linear layers dense in the compute dtype.
  Quantizer::Options quantization;            ///< For a checkpoint that is not quantized yet.
  bool keep_blocks = true;  ///< Of a GGUF file: its blocks are the weights. false: their values are, as those of a checkpoint.
  std::vector<std::string> skip_modules;  ///< Linear layers left dense: full names or trailing parts ("down_proj").
  at::Device device = at::kCPU;
  /// The embedding table goes straight to pinned host memory (nn/memory_settings.hpp); nothing on a CPU and where the head is tied to
  /// it.
  bool embedding_on_host = false;
  /// The linear layers' weights go to pinned host memory as they come (nn/memory_settings.hpp); nothing on a CPU.
  bool base_on_host = false;
  /// The base is sharded over these ranks: each holds a shard of every block, and of embedding and head unless they are one table. Blocks are
  /// gathered one ahead of the computation, tables where they are used. Each rank reads its share of the checkpoint. From then on all ranks make the same calls in the same order. Null, or
  /// one rank: this process has all of them. @throws ValueError with base_on_host.
  std::shared_ptr<Communicator> shard_over = {};
};

}  // namespace qlorapp
