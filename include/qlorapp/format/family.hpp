// SPDX-License-Identifier: Apache-2.0
/// A model family is a row of one table: what its config files leave out, which keys it reads, and what a block consists of. Torch-free.
///
/// Source: transformers 5.23, the config class and the modeling file of each family.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace qlorapp::format {

/// Use of a parameter. QLoRA quantizes kLinear.
enum class Role : uint8_t { kEmbedding, kNorm, kLinear, kHead };

/// Extents that a config gives: hidden_size, heads * head_dim, kv_heads * head_dim, intermediate_size.
enum class Size : uint8_t { kHidden, kQueries, kKeys, kInner };

/// A parameter of every block.
struct BlockRow {
  std::string_view path;  ///< Behind "model.layers.N.".
  Role role;
  Size out;
  Size in = Size::kHidden;  ///< A norm has none.
};

/// A key whose every other value than null, false, "empty" and `neutral` changes the result.
struct RefusedKey {
  std::string_view key;
  double neutral;
  std::string_view reason;
};

/// The defaults are those of the family's config class in transformers, for keys that a file leaves out.
struct Family {
  std::string_view architecture;  ///< Entry of "architectures".
  std::string_view model_type;
  std::span<const BlockRow> block;  ///< Norms, then linear layers, each in the order of the forward pass.
  bool tie_word_embeddings;
  double rms_norm_eps;
  double rope_theta;
  int64_t max_position_embeddings;
  std::span<const std::string_view> ignored_keys;  ///< On top of those that change nothing in any family.
  std::span<const RefusedKey> refused_keys;        ///< On top of those that no family here supports.
};

/// The table.
[[nodiscard]] std::span<const Family> families();

}  // namespace qlorapp::format
