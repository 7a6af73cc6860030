// SPDX-License-Identifier: Apache-2.0
/// A model folder as config.json and the tensors beside it settle it together: the one rule of all that read weights.
///
///     tables   tie_word_embeddings with both tables in the files: one table if their bytes are equal, otherwise two, with one warning.
///              With lm_head.weight alone: that is the table, read under the embedding's name.
///     names    files of the model without its head (LlamaModel) have no "model." in front; they are read with it. A wrapper's files, which
///              have the names of transformers 4 or 5, are read with those that transformers 5 has in memory.
///     tensors  each belongs to a parameter of the config, or the folder is refused by the name of one that does not. Rotary frequencies
///              that older programs stored are computed from config.json and not read. Tensors beside a wrapper's text are kept apart.
///
/// Source: transformers 5.23 `PreTrainedModel.tie_weights` and `_adjust_missing_and_unexpected_keys`, which lists other tensors as unexpected.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "format/tensor_files.hpp"
#include "qlorapp/format/model_layout.hpp"

namespace qlorapp::format {

inline constexpr std::string_view kHeadTable = "lm_head.weight";

struct ModelFolder {
  ModelConfig config;  ///< tie_word_embeddings is false if the files hold two tables that differ.
  TensorFiles tensors;
  /// Parts of a wrapper beside its text, by their names in memory ("model.vision_tower"): the engine does not compute them.
  std::vector<std::string> other_parts;

  /// Whether the tensor belongs to one of them.
  [[nodiscard]] bool is_other(std::string_view name) const;
};

/// @throws IoError, FormatError as load_model_config and TensorFiles; FormatError naming file and tensor for one that the model lacks.
[[nodiscard]] ModelFolder open_model_folder(const std::string& folder);

/// The config of open_model_folder; of a folder without weights, config.json's. @throws as these.
[[nodiscard]] ModelConfig settled_config(const std::string& folder);

/// Whether the files hold both tables and these differ in dtype, shape or bytes. @throws IoError, FormatError if they cannot be read.
[[nodiscard]] bool has_two_tables(const TensorFiles& files, const ModelConfig& config);

/// config.json with tie_word_embeddings as `config` has it, for a folder that gets the same weights; the very text if it says so already.
/// @param path  names the text in messages. @throws FormatError.
[[nodiscard]] std::string with_tables_of(const ModelConfig& config, std::string text, const std::string& path);

}  // namespace qlorapp::format
