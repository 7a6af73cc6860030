// SPDX-License-Identifier: Apache-2.0
/// The files beside the weights of a merged checkpoint.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "qlorapp/format/dtype.hpp"

namespace qlorapp {

/// What a base's config.json says that merging depends on, in any family.
struct BaseConfig {
  std::string path;
  std::optional<format::Dtype> dtype;       ///< Of the weights: F32, F16 or BF16.
  std::optional<bool> tie_word_embeddings;  ///< None: the default of its family.
  std::optional<int64_t> vocab_size;        ///< The text model's, if a wrapper has one.
};
/// @throws FormatError if it says that weights are quantized in another way than bitsandbytes' four bits; IoError.
[[nodiscard]] BaseConfig read_base_config(const std::string& folder);

/// How a merged model's config.json differs from its base's. quantization_config goes in any case.
struct MergedConfig {
  std::string dtype;                  ///< Of the written weights, as config.json names it.
  bool separates_head = false;        ///< The head has become a tensor of its own.
  std::optional<int64_t> vocab_size;  ///< Of tables that were resized.
};

/// Writes all of them: generation settings and license of the base, tokenizer and templates of the adapter if it has them, else of the
/// base, then config.json. Last, because a folder without
/// config.json is no model.
/// @param base     the base's folder.  @param adapter  the adapter's.  @param output  a folder that exists.  @throws FormatError, IoError.
void write_files_beside_weights(const std::string& base, const std::string& adapter, const std::string& output,
                                const MergedConfig& config);

}  // namespace qlorapp
