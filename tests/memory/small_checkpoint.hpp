// SPDX-License-Identifier: Apache-2.0
/// A Llama of three layers on disk, for tests that load or merge it.
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <tuple>
#include <vector>

#include "core/check.hpp"
#include "files/atomic_file.hpp"
#include "format/expect_error.hpp"
#include "io/tensor_file.hpp"

/// Of weights that take several of a loader's buffers, some that take less than one.
inline std::string small_config(const char* dtype, bool tied) {
  return qlorapp::message(
      R"({{"architectures":["LlamaForCausalLM"],"model_type":"llama","hidden_act":"silu","hidden_size":512,)"
      R"("intermediate_size":1536,"num_hidden_layers":3,"num_attention_heads":8,"num_key_value_heads":2,"vocab_size":4000,)"
      R"("max_position_embeddings":512,"rms_norm_eps":1e-5,"torch_dtype":"{}","tie_word_embeddings":{}}})",
      dtype, tied ? "true" : "false");
}

inline void write_small_checkpoint(const TemporaryFolder& folder, const char* name, at::ScalarType dtype, bool tied) {
  at::manual_seed(1);
  qlorapp::NamedTensors tensors;
  const auto add = [&](const std::string& tensor, std::vector<int64_t> shape) {
    tensors.emplace_back(tensor + ".weight", at::randn(shape).mul_(0.02).to(dtype));
  };
  add("model.embed_tokens", {4000, 512});
  if (!tied) add("lm_head", {4000, 512});
  add("model.norm", {512});
  for (int i = 0; i < 3; ++i) {
    const std::string layer = qlorapp::message("model.layers.{}.", i);
    add(layer + "input_layernorm", {512});
    add(layer + "post_attention_layernorm", {512});
    for (const auto& [module, out, in] : {std::tuple{"self_attn.q_proj", 512, 512},
                                          {"self_attn.k_proj", 128, 512},
                                          {"self_attn.v_proj", 128, 512},
                                          {"self_attn.o_proj", 512, 512},
                                          {"mlp.gate_proj", 1536, 512},
                                          {"mlp.up_proj", 1536, 512},
                                          {"mlp.down_proj", 512, 1536}})
      add(layer + module, {out, in});
  }
  qlorapp::write_tensors(folder / "model.safetensors", tensors);
  qlorapp::files::write_file_atomically(folder / "config.json", small_config(name, tied));
}
