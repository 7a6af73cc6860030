// SPDX-License-Identifier: Apache-2.0
#include "adapter_file.hpp"

#include <ATen/ATen.h>

#include <array>
#include <cstdio>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "core/nearest_name.hpp"
#include "files/folder.hpp"
#include "files/folder_update.hpp"
#include "files/manifest.hpp"
#include "io/tensor_file.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/io/text_files.hpp"

namespace qlorapp {

namespace {

/// An adapter in a checkpoint is read as it was written, or not at all. In another folder a program that knows no manifest may have saved new
/// weights. @returns whether the files are those of the manifest; true without one.
bool check_against_manifest(const std::string& folder) {
  if (!files::has_entry(folder, files::kManifestName)) return true;
  std::vector<std::string> damage;
  try {
    files::Manifest manifest = files::read_manifest(folder);
    const bool is_output = manifest.kind == files::kOutputKind;
    std::erase_if(manifest.files, [&](const files::ManifestFile& file) {
      return (file.name != kAdapterConfig || is_output) && file.name != kAdapterWeights &&
             (is_output || !TextFiles::is_one(file.name));
    });
    damage = files::damage(folder, manifest);
    if (is_output && !damage.empty()) {
      log_warning_once(message(
          "[adapter] {}: {} (MANIFEST.json). Either the file is damaged, or another program saved it; then remove MANIFEST.json.",
          folder, damage.front()));
      return false;
    }
  } catch (const FormatError& error) {
    if (files::has_entry(folder, "run_state.json") || files::file_name(folder).starts_with("checkpoint-")) throw;
    log_warning_once(message("[adapter] {}", error.what()));
    return false;
  }
  QLORAPP_CHECK_FORMAT(damage.empty(), "[adapter] {} is damaged: {}. Use another checkpoint.", folder, joined(damage));
  return true;
}

}  // namespace

AdapterFile open_adapter(const std::string& folder, format::AdapterUse use) {
  files::finish_update(folder, kAdapterConfig);
  const bool is_as_written = check_against_manifest(folder);
  format::AdapterConfig config = format::load_adapter_config(folder, use);
  const std::string weights = files::path_in(folder, kAdapterWeights);
  QLORAPP_CHECK_FORMAT(files::exists(weights) || !files::exists(files::path_in(folder, "adapter_model.bin")),
                       "[adapter] {} must hold adapter_model.safetensors; it holds adapter_model.bin. That is a pickle, which can "
                       "run any code and is never read. If you trust it, load it in PEFT and save it again with save_pretrained().",
                       folder);
  format::SafetensorsFile file(files::FileReader::open_inside(folder, std::string(kAdapterWeights)));
  LoraConfig lora = as_config_asks(folder, [&] { return from_adapter_config(config); });
  return {std::move(config), std::move(lora), std::move(file), is_as_written};
}

std::string fingerprint_text(uint64_t fingerprint) {
  std::array<char, 17> text{};
  std::snprintf(text.data(), text.size(), "%016llx", static_cast<unsigned long long>(fingerprint));
  return text.data();
}

void check_fingerprint(const format::AdapterConfig& config, const std::string& folder, const std::string& fingerprint) {
  QLORAPP_CHECK_VALUE(!config.base_fingerprint || *config.base_fingerprint == fingerprint,
                      "[adapter] {} was trained on the base that its initialization changed; this model has another base. Load the "
                      "base that was saved with it.",
                      folder);
}

void check_names_and_shapes(const NamedTensors& tensors, const format::SafetensorsFile& file, const std::set<std::string>& others) {
  std::set<std::string_view> wanted;
  std::vector<std::string_view> known;
  for (const auto& [name, tensor] : tensors) {
    wanted.insert(name);
    known.push_back(name);
  }
  for (const format::TensorEntry& entry : file.tensors()) {
    QLORAPP_CHECK_FORMAT(wanted.contains(entry.name) || others.contains(entry.name),
                         "[adapter] {} holds '{}', which does not fit this model and adapter_config.json.{} Is it the adapter of "
                         "another base model?",
                         file.path(), entry.name, did_you_mean(entry.name, known));
  }
  for (const auto& [name, tensor] : tensors) {
    const format::TensorEntry* found = file.find(name);
    QLORAPP_CHECK_FORMAT(found != nullptr,
                         "[adapter] {} lacks '{}', which adapter_config.json requires. Is it the adapter of another base model?",
                         file.path(), name);
    QLORAPP_CHECK_FORMAT(
        found->shape == tensor.sizes().vec(),
        "[adapter] {}: '{}' must have shape {} for this base model; got {}. It is the adapter of another base model or rank.",
        file.path(), name, joined(tensor.sizes()), joined(found->shape));
    QLORAPP_CHECK_FORMAT(at::isFloatingType(scalar_type_of(found->dtype, name)),
                         "[adapter] {}: '{}' must be float32, float16 or bfloat16; got {}.", file.path(), name,
                         format::dtype_name(found->dtype));
  }
}

at::Tensor read_value(const format::SafetensorsFile& file, const std::string& name) {
  const at::Tensor value = read_tensor(file, file.at(name)).to(at::kFloat);
  QLORAPP_CHECK_FORMAT(value.isfinite().all().item<bool>(), "[adapter] {}: '{}' must be finite; it holds inf or nan.", file.path(),
                       name);
  return value;
}

}  // namespace qlorapp
