// SPDX-License-Identifier: Apache-2.0
/// What the programs of this folder measure or compute: shapes of real models, and the settings of a step as words NAME=VALUE.
#pragma once

#include <cstdint>
#include <string>

#include "qlorapp/core/check.hpp"
#include "qlorapp/format/model_config.hpp"
#include "qlorapp/nn/lora_config.hpp"
#include "qlorapp/nn/rehearsal.hpp"

namespace qlorapp::bench {

inline format::ModelConfig config_of(const std::string& model) {
  const auto json = [](int hidden, int intermediate, int layers, int heads, int head_dim, bool tied) {
    return concat(
        R"({"model_type":"llama","architectures":["LlamaForCausalLM"],"hidden_act":"silu","hidden_size":)", hidden,
        R"(,"intermediate_size":)", intermediate, R"(,"num_hidden_layers":)", layers, R"(,"num_attention_heads":)", heads,
        R"(,"num_key_value_heads":8,"head_dim":)", head_dim,
        R"(,"vocab_size":128256,"max_position_embeddings":131072,"rms_norm_eps":1e-5,"rope_theta":500000.0,"tie_word_embeddings":)",
        tied, "}");
  };
  if (model == "70b") return format::parse_model_config(json(8192, 28672, 80, 64, 128, false), model);
  if (model == "8b") return format::parse_model_config(json(4096, 14336, 32, 32, 128, false), model);
  if (model == "3b") return format::parse_model_config(json(3072, 8192, 28, 24, 128, true), model);
  if (model == "1b") return format::parse_model_config(json(2048, 8192, 16, 32, 64, true), model);
  throw ValueError(concat("MODEL must be 70b, 8b, 3b or 1b; got ", model));
}

/// r = 16 on all seven linear layers.
inline LoraConfig lora_config() {
  LoraConfig lora;
  lora.r = 16;
  lora.lora_alpha = 32;
  lora.target_modules = NamesOrPattern("all-linear");
  return lora;
}

struct Setting {
  int64_t rows = 2, length = 2048;
  std::string keep = "everything";
  MemorySettings memory;
  double cap = 0;  ///< GiB.

  /// @returns false if the word is no NAME=VALUE.
  bool set(const std::string& word) {
    const size_t equals = word.find('=');
    if (equals == std::string::npos) return false;
    const std::string name = word.substr(0, equals), value = word.substr(equals + 1);
    if (name == "batch") rows = std::stoll(value);
    else if (name == "sequence") length = std::stoll(value);
    else if (name == "keep") keep = value;
    else if (name == "loss_chunk_rows") memory.loss_chunk_rows = std::stoll(value);
    else if (name == "mlp_tile_rows") memory.mlp_tile_rows = std::stoll(value);
    else if (name == "weight_workspace") memory.weight_workspace = parse_weight_workspace(value);
    else if (name == "embedding_on_host") memory.embedding_on_host = value != "0";
    else if (name == "cap") cap = std::stod(value);
    else throw ValueError(concat("no setting is called ", name));
    return true;
  }

  [[nodiscard]] Rehearsal rehearsed(const format::ModelConfig& config, at::ScalarType dtype) const {
    RehearsalOptions options;
    options.dtype = dtype;
    options.rows = rows;
    options.length = length;
    options.segments = parse_segments(keep, config.num_hidden_layers);
    options.memory = memory;
    return rehearse(config, lora_config(), options);
  }
};

}  // namespace qlorapp::bench
