// SPDX-License-Identifier: Apache-2.0
/// The parameters of a model, listed once from its family's row. Loading, checks, quantization, saving, merging, fingerprints, plans, counts
/// and adapter names loop over this list. Torch-free.
///
/// Source: the module tree of transformers' model of the family.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "qlorapp/format/family.hpp"
#include "qlorapp/format/model_config.hpp"

namespace qlorapp::format {

struct Parameter {
  std::string module;          ///< Path in the module tree: "model.layers.0.self_attn.q_proj"; ModelConfig::body() begins it.
  std::vector<int64_t> shape;  ///< (out, in) of a linear layer, (rows, width) of a table, (width) of a norm, (out) of a bias.
  Role role = Role::kLinear;
  int64_t layer = -1;  ///< The block that it belongs to; -1: none.
  size_t slot = 0;     ///< Its place among its block's linear layers, or among the block's norms and biases.

  /// Its name in a checkpoint.
  [[nodiscard]] std::string name() const { return module + (role == Role::kBias ? ".bias" : ".weight"); }
  [[nodiscard]] int64_t numel() const;
};

/// Every parameter: the tables, then block by block norms, biases and linear layers in the order of the family's row, then the last norm. A head that is
/// tied to the embedding is none.
[[nodiscard]] std::vector<Parameter> parameters(const ModelConfig& config);

/// Those of one role, in the same order.
[[nodiscard]] std::vector<Parameter> parameters(const ModelConfig& config, Role role);

/// Modules of the two tables: "model.embed_tokens", and "lm_head", which is tied where it is no parameter.
[[nodiscard]] std::string embedding_module(const ModelConfig& config);
inline constexpr std::string_view kHeadModule = "lm_head";

/// For each linear layer of a block the slot of its bias.
[[nodiscard]] std::vector<std::optional<size_t>> bias_slots(const ModelConfig& config);

/// The last words of the linear layers' names, "q_proj" first: what target_modules may name.
[[nodiscard]] std::vector<std::string> linear_words(const ModelConfig& config);

/// Elements of all parameters. @throws ValueError from 2^63 on.
[[nodiscard]] int64_t parameter_count(const ModelConfig& config);

}  // namespace qlorapp::format
