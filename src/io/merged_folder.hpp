// SPDX-License-Identifier: Apache-2.0
/// The files beside the weights of a merged checkpoint.
#pragma once

#include <string>

namespace qlorapp {

/// How a merged model's config.json differs from its base's. quantization_config goes in any case.
struct MergedConfig {
  std::string dtype;            ///< Of the written weights, as config.json names it.
  bool separates_head = false;  ///< The head has become a tensor of its own.
};

/// Writes all of them: tokenizer, templates, generation settings and license of the base, then config.json. Last, because a folder without
/// config.json is no model.
/// @param base     the base's folder.  @param adapter  the adapter's.  @param output  a folder that exists.  @throws FormatError, IoError.
void write_files_beside_weights(const std::string& base, const std::string& adapter, const std::string& output,
                                const MergedConfig& config);

}  // namespace qlorapp
