// SPDX-License-Identifier: Apache-2.0
#include "merged_folder.hpp"

#include <nlohmann/json.hpp>

#include "format/atomic_file.hpp"
#include "format/folder.hpp"
#include "format/python_json.hpp"
#include "model_files.hpp"
#include "qlorapp/format/json.hpp"

namespace qlorapp {
namespace {

std::string merged_config(const std::string& base, const MergedConfig& config) {
  const std::string path = format::path_in(base, "config.json");
  format::Json json = format::parse_json(read_text(path), path, {.allow_nonfinite = true});
  json.erase("quantization_config");
  if (json.contains("torch_dtype")) json["torch_dtype"] = config.dtype;
  if (json.contains("dtype") || !json.contains("torch_dtype")) json["dtype"] = config.dtype;
  if (config.separates_head) json["tie_word_embeddings"] = false;
  return format::dump_python_json(json, format::kConfigStyle) + "\n";
}

}  // namespace

void write_files_beside_weights(const std::string& base, const std::string& /*adapter*/, const std::string& output,
                                const MergedConfig& config) {
  copy_model_files(base, output);
  format::write_file_atomically(format::path_in(output, "config.json"), merged_config(base, config));
}

}  // namespace qlorapp
