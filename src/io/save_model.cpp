// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/io/save_model.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "files/atomic_file.hpp"
#include "files/folder.hpp"
#include "files/manifest.hpp"
#include "format/model_folder.hpp"
#include "format/tensor_files.hpp"
#include "io/linear_weight.hpp"
#include "io/tensor_file.hpp"
#include "json/python_json.hpp"
#include "model_files.hpp"
#include "nn/decoder.hpp"
#include "qlorapp/format/quantization_config.hpp"
#include "qlorapp/json/json.hpp"

namespace qlorapp {
namespace {

at::ScalarType storage_type(const std::string& name) {
  if (name == "uint8") return at::kByte;
  if (name == "int8") return at::kChar;
  if (name == "float16") return at::kHalf;
  if (name == "bfloat16") return at::kBFloat16;
  if (name == "float32") return at::kFloat;
  if (name == "float64") return at::kDouble;
  throw ValueError(
      message("[save] bnb_4bit_quant_storage must be uint8, int8, float16, bfloat16, float32 or float64; got '{}'.", name));
}

/// The first quantized weight: all of a model are of one kind.
const QuantizedTensor* first_quantized(const CausalLM& model) {
  for (const DecoderBlock& block : model.blocks()) {
    for (const FrozenWeight& weight : block.weights().projections) {
      if (weight.quantized.defined()) return &weight.quantized;
    }
  }
  return nullptr;
}

NamedTensors base_tensors(const CausalLM& model, at::ScalarType storage) {
  NamedTensors tensors;
  const Decoder& decoder = model.decoder();
  for (const format::Parameter& parameter : decoder.parameters()) {
    const std::string name = parameter.name();
    const bool is_linear = parameter.role == format::Role::kLinear;
    if (!is_linear || !decoder.own_linear(parameter).quantized.defined()) {
      tensors.emplace_back(name, is_linear ? decoder.own_linear(parameter).dense : decoder.dense(parameter));
      continue;
    }
    for (auto& [part, tensor] : quantized_tensors(name, decoder.own_linear(parameter).quantized)) {
      const bool packed = part == name && storage != at::kByte;
      tensors.emplace_back(part, packed ? tensor.reshape({-1}).view(storage).reshape({-1, 1}) : tensor);
    }
  }
  return tensors;
}

using Files = std::vector<std::pair<std::string, NamedTensors>>;

/// Adds the tensors of a wrapper's folder that are not of its text.
void add_other_parts(NamedTensors& tensors, const CausalLM& model, const std::string& source) {
  if (model.config().wrapper == nullptr) return;
  const format::ModelFolder folder = format::open_model_folder(source);
  for (const format::TensorLocation& location : folder.tensors.tensors()) {
    if (folder.is_other(location.tensor->name)) tensors.emplace_back(location.tensor->name, read_tensor(location));
  }
}

/// One file, or the shards of a source that has these very tensors in several.
Files files_like(const std::string& source, NamedTensors tensors) {
  const format::TensorFiles stored(source);
  const auto has = [&](const auto& tensor) { return stored.find(tensor.first) != nullptr; };
  Files files;
  if (stored.files().size() == 1 || stored.tensors().size() != tensors.size() ||
      !std::all_of(tensors.begin(), tensors.end(), has)) {
    files.emplace_back("model.safetensors", std::move(tensors));
    return files;
  }
  for (const auto& file : stored.files()) {
    files.emplace_back(files::file_name(file->path()), NamedTensors());
    for (auto& tensor : tensors) {
      if (stored.find(tensor.first)->file == file.get()) files.back().second.push_back(tensor);
    }
  }
  return files;
}

/// config.json with the dtype that the weights now have, under the key that it has it.
std::string with_dtype(const std::string& text, const std::string& path, at::ScalarType dtype) {
  format::Json json = format::parse_json(text, path, {.allow_nonfinite = true});
  const std::string name(format::torch_name(format_dtype_of(dtype)));
  bool changed = false;
  for (const char* key : {"dtype", "torch_dtype"}) {
    if (!json.contains(key) || json[key] == name) continue;
    json[key] = name;
    changed = true;
  }
  return changed ? format::dump_python_json(json, format::kConfigStyle) + "\n" : text;
}

}  // namespace

void save_model(const CausalLM& model, const std::string& source, const std::string& output, const SaveOptions& options) {
  QLORAPP_CHECK_VALUE(
      !model.decoder().is_sharded(),
      "[save] a sharded base (base_sharding) cannot be written as one model. Save the adapter, and merge it with qlorapp merge.");
  QLORAPP_CHECK_VALUE(!files::is_same_file(source, output), "[save] {} is the folder that the model was loaded from. Name another.",
                      output);
  files::make_folders("save", output);
  const std::string config_path = files::path_in(source, "config.json");
  std::string config =
      with_dtype(format::with_tables_of(model.config(), read_text(config_path), config_path), config_path, model.dtype());
  const format::Json json = format::parse_json(config, config_path, {.allow_nonfinite = true});
  const QuantizedTensor* const quantized = first_quantized(model);
  std::string storage = options.storage;
  if (json.contains("quantization_config")) {
    storage = format::parse_quantization_config(json["quantization_config"], config_path).storage;
  } else if (quantized != nullptr) {
    format::QuantizationConfig quantization;
    quantization.quant_type = quantized->quant_type;
    quantization.double_quant = quantized->double_quantized();
    quantization.compute_dtype = format_dtype_of(options.compute_dtype.value_or(at::kFloat));
    quantization.storage = storage;
    quantization.skip_modules = options.skip_modules;
    config = format::with_quantization_config(config, config_path, quantization);
  }
  const bool has_manifest = !files::is_staging(output);  // a folder that is committed as a whole gets its own
  const std::string manifest_path = files::path_in(output, files::kManifestName);
  if (has_manifest && std::remove(manifest_path.c_str()) != 0 && errno != ENOENT)  // of an earlier save
    throw IoError(message("[save] cannot remove {} of an earlier save. Name another folder.", manifest_path), errno);
  std::vector<std::string> names;
  NamedTensors all = base_tensors(model, storage_type(storage));
  add_other_parts(all, model, source);
  const Files files = files_like(source, std::move(all));
  for (const auto& [name, tensors] : files) {
    write_tensors(files::path_in(output, name), tensors);
    names.push_back(name);
  }
  // Removes an older single file or index: readers would prefer it.
  const std::string index = "model.safetensors.index.json", stale = files.size() > 1 ? "model.safetensors" : index;
  if (files.size() > 1) {
    files::write_file_atomically(files::path_in(output, index), read_text(files::path_in(source, index)));
    names.push_back(index);
  }
  const std::string left = files::path_in(output, stale);
  if (std::remove(left.c_str()) != 0 && errno != ENOENT)
    throw IoError(message("[save] cannot remove {} of an earlier save. Name another folder.", left), errno);
  const std::string generation = files::path_in(source, "generation_config.json");
  if (files::is_regular_file(generation)) {
    files::write_file_atomically(files::path_in(output, "generation_config.json"), read_text(generation));
    names.emplace_back("generation_config.json");
  }
  // Last, because a folder without it is no model.
  files::write_file_atomically(files::path_in(output, "config.json"), config);
  names.emplace_back("config.json");
  if (!has_manifest) return;
  if (const auto manifest = files::output_manifest(output, output, names)) files::write_file_atomically(manifest_path, *manifest);
}

}  // namespace qlorapp
