// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/io/inspect.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <cerrno>
#include <optional>

#include "adapter_file.hpp"
#include "core/check.hpp"
#include "files/folder.hpp"
#include "files/manifest.hpp"
#include "format/model_folder.hpp"
#include "format/quant_state.hpp"
#include "format/tensor_files.hpp"
#include "io/checkpoint_folder.hpp"
#include "io/finite.hpp"
#include "io/linear_weight.hpp"
#include "io/tensor_file.hpp"
#include "qlorapp/core/units.hpp"
#include "qlorapp/format/model_layout.hpp"
#include "saved_tables.hpp"

namespace qlorapp {
namespace {

constexpr int64_t kPiece = int64_t{1} << 20;  // elements read at a time

bool has(const std::string& folder, std::string_view name) { return files::exists(files::path_in(folder, name)); }

/// Runs a check whose failure is damage.
template <class Check>
void look(Inspection& found, const Check& check) {
  try {
    check();
  } catch (const IoError& error) {
    if (error.error_number() != ENOENT) throw;
    found.damage.push_back(first_line(error));
  } catch (const FormatError& error) { found.damage.push_back(first_line(error)); } catch (const ValueError& error) {
    found.damage.push_back(first_line(error));
  }
}

/// @returns bytes. Adds the tensors whose numbers are not finite.
int64_t read_all(const format::TensorSource& file, Inspection& found) {
  int64_t bytes = 0;
  for (const format::TensorEntry& entry : file.tensors()) {
    const at::ScalarType type = scalar_type_of(entry.dtype, entry.name);
    const auto width = static_cast<int64_t>(c10::elementSize(type));
    at::Tensor piece = at::empty({kPiece}, at::TensorOptions().dtype(type));
    int64_t numel = 1;
    for (const int64_t extent : entry.shape) numel *= extent;
    bool finite = true;
    for (int64_t begin = 0; begin < numel; begin += kPiece) {
      const at::Tensor part = piece.narrow(0, 0, std::min(kPiece, numel - begin));
      file.read(entry, begin * width, bytes_of(part));
      finite = finite && all_finite(part);
    }
    if (!finite) found.damage.push_back(message("{}: '{}' holds inf or nan", files::file_name(file.path()), entry.name));
    bytes += numel * width;
  }
  return bytes;
}

std::string text(int64_t bytes) { return to_string(Bytes{bytes}); }

/// Each lora_A and lora_B of the rank that the config asks for, and none alone.
void check_pairs(const AdapterFile& adapter, Inspection& found) {
  constexpr std::string_view kA = ".lora_A.weight", kB = ".lora_B.weight";
  for (const format::TensorEntry& entry : adapter.file.tensors()) {
    const bool is_a = entry.name.ends_with(kA);
    if (!is_a && !entry.name.ends_with(kB)) continue;
    const std::string module = entry.name.substr(0, entry.name.size() - kA.size());
    std::string plain = module;
    if (plain.starts_with(kPeftPrefix)) plain.erase(0, kPeftPrefix.size());
    const int64_t rank = adapter.lora.rank_of(plain);
    if (entry.shape.size() != 2 || entry.shape[is_a ? 0 : 1] != rank)
      found.damage.push_back(message("{}: '{}' has shape {}; adapter_config.json gives it rank {}", kAdapterWeights, entry.name,
                                     joined(entry.shape), rank));
    if (adapter.file.find(module + std::string(is_a ? kB : kA)) == nullptr)
      found.damage.push_back(message("{}: '{}' stands alone", kAdapterWeights, entry.name));
  }
}

/// Does the engine compute the base that the adapter names? None if its folder is not at hand.
std::optional<bool> has_known_base(const AdapterFile& adapter) {
  const std::string base = adapter.config.base_model_name_or_path.value_or("");
  if (base.empty() || !files::is_regular_file(files::path_in(base, "config.json"))) return std::nullopt;
  try {
    static_cast<void>(format::load_model_config(base));
    return true;
  } catch (const Error&) { return false; }
}

/// The programs that load an adapter: all of them merge it; computing it beside its base takes a known base and known parts.
std::vector<std::string> loaders_of(const std::string& folder, const AdapterFile& adapter) {
  std::vector<std::string> loads_in{"PeftModel.from_pretrained(base, folder)"};
  bool computes = true;
  try {
    check_computes(open_adapter(folder));
  } catch (const Error&) { computes = false; }
  const std::optional<bool> known = has_known_base(adapter);
  if (!computes || known == false) {
    loads_in.emplace_back("qlorapp merge --adapter");
    return loads_in;
  }
  const std::string condition = known ? "" : ", if the base is of a family that qlorapp computes";
  if (!condition.empty()) loads_in.emplace_back("qlorapp merge --adapter");
  loads_in.push_back(message("qlorapp eval, generate{} --adapter{}", known ? " and merge" : "", condition));
  loads_in.push_back(message("qlorapp train --init_adapter{}", condition));
  return loads_in;
}

constexpr const char *kChecksums = "checksums", *kChanged = "changed since", *kUnknown = "without checksums";

/// An output's files beside its manifest.
void compare_with_manifest(const std::string& folder, Inspection& found) {
  if (!has(folder, files::kManifestName)) {
    found.facts.emplace_back(kChecksums, "none: there is no MANIFEST.json, so a changed weight is not found");
    return;
  }
  look(found, [&] {
    files::Manifest manifest = files::read_manifest(folder);
    if (manifest.kind != files::kOutputKind) return;
    const auto is_weights = [](const std::string& name) { return name.ends_with(".safetensors"); };
    std::vector<std::string> edited, unknown;
    for (const std::string& name : files::names_in(folder)) {
      const auto is_it = [&](const files::ManifestFile& file) { return file.name == name; };
      if (is_weights(name) && std::none_of(manifest.files.begin(), manifest.files.end(), is_it)) unknown.push_back(name);
    }
    const size_t damage_before = found.damage.size();
    for (files::ManifestFile& file : manifest.files) {
      const std::string name = file.name;
      const std::vector<std::string> lines = files::damage(folder, {manifest.kind, {}, {}, 0, {std::move(file)}});
      if (lines.empty()) continue;
      if (is_weights(name))
        found.damage.push_back(message("{} (MANIFEST.json); damaged, or saved by another program", lines.front()));
      else edited.push_back(name);
    }
    found.facts.emplace_back(kChecksums, message("{} files of MANIFEST.json", manifest.files.size()));
    if (!edited.empty()) found.facts.emplace_back(kChanged, joined(edited));
    if (!unknown.empty()) found.facts.emplace_back(kUnknown, joined(unknown));
    found.is_verified = unknown.empty() && found.damage.size() == damage_before;
  });
}

Inspection inspect_adapter(const std::string& folder) {
  Inspection found{"adapter", {}, {}, {}};
  if (has(folder, ".qlorapp-pending"))
    found.facts.emplace_back("unfinished save", "the next program of this library that opens the folder completes it");
  look(found, [&] {
    const AdapterFile adapter = open_adapter(folder, format::AdapterUse::kMerge);
    found.facts.emplace_back("base model", adapter.config.base_model_name_or_path.value_or("not named"));
    found.facts.emplace_back("rank, alpha", message("{}, {}", adapter.lora.r, adapter.lora.lora_alpha));
    found.facts.emplace_back("tensors", message("{}", std::ssize(adapter.file.tensors())));
    found.facts.emplace_back("bytes", text(read_all(adapter.file, found)));
    check_pairs(adapter, found);
    found.loads_in = loaders_of(folder, adapter);
  });
  compare_with_manifest(folder, found);
  return found;
}

Inspection inspect_checkpoint(const std::string& folder) {
  Inspection found{"checkpoint", {}, {}, {}};
  look(found, [&] {
    const files::Manifest manifest = files::read_manifest(folder);
    found.facts.emplace_back("step", message("{}", manifest.step));
    found.facts.emplace_back("run", manifest.run_id);
    found.facts.emplace_back("continues", manifest.parent.empty() ? "nothing; it is the run's first" : manifest.parent);
    int64_t bytes = 0;
    for (const files::ManifestFile& file : manifest.files) bytes += file.size;
    found.facts.emplace_back("files", message("{}, {}", std::ssize(manifest.files), text(bytes)));
    found.damage = files::damage(folder, manifest);
    found.is_verified = true;
  });
  const bool resumes = has(folder, "run_state.json");
  if (resumes) found.loads_in.emplace_back("qlorapp train --resume_from_checkpoint and Trainer.train(resume_from_checkpoint=…)");
  if (has(folder, kAdapterConfig)) {
    const Inspection adapter = inspect_adapter(folder);
    found.facts.insert(found.facts.end(), adapter.facts.begin(), adapter.facts.end());
    if (found.damage.empty()) found.damage = adapter.damage;
    found.loads_in.insert(found.loads_in.end(), adapter.loads_in.begin(), adapter.loads_in.end());
  }
  return found;
}

Inspection inspect_model(const std::string& folder) {
  Inspection found{"model", {}, {}, {}};
  std::optional<format::ModelConfig> config;
  try {
    config = format::load_model_config(folder);
    found.facts.emplace_back("architecture", config->family->model_type);
  } catch (const Error& error) { found.facts.emplace_back("architecture", message("none of the engine's: {}", first_line(error))); }
  look(found, [&] {
    const format::TensorFiles files(folder);
    int64_t bytes = 0;
    for (const auto& file : files.files()) bytes += read_all(*file, found);
    found.facts.emplace_back("files", message("{}, {}", std::ssize(files.files()), text(bytes)));
    if (!config) return;
    const format::ModelFolder model = format::open_model_folder(folder);
    const format::TensorFiles& tensors = model.tensors;
    found.facts.emplace_back("parameters", message("{}", format::parameter_count(model.config)));
    if (!model.other_parts.empty()) found.facts.emplace_back("beside its text", joined(model.other_parts));
    std::vector<StreamedTensor> unread;
    for (const format::Parameter& parameter : format::parameters(model.config)) {
      const std::string name = parameter.name();
      look(found, [&] {
        if (parameter.role != format::Role::kLinear || !format::is_quantized(tensors, name))
          return static_cast<void>(find_checked(tensors, name, parameter.shape));
        found.kind = "four-bit model";
        static_cast<void>(stream_quantized(unread, tensors, name, parameter.shape));
      });
    }
  });
  compare_with_manifest(folder, found);
  found.loads_in = {config ? "qlorapp train, eval, generate, merge and quantize --model"
                           : "qlorapp merge --model, and AutoModelForCausalLM of this library",
                    found.kind == "model" ? "transformers" : "transformers with bitsandbytes"};
  return found;
}

Inspection inspect_run(const std::string& folder) {
  Inspection found{"output folder of a run", {}, {}, {}, true};
  for (const auto& [step, path] : list_checkpoints(folder)) {
    const Inspection one = inspect_checkpoint(path);
    const std::string name = files::file_name(path);
    found.facts.emplace_back(name, one.damage.empty() ? "whole" : "damaged");
    for (const std::string& line : one.damage) found.damage.push_back(message("{}: {}", name, line));
  }
  const NewestCheckpoint newest = newest_checkpoint(folder);
  found.facts.emplace_back("--resume_from_checkpoint true",
                           newest.path ? files::file_name(*newest.path) : "no checkpoint to resume from");
  for (const std::string& line : newest.skipped) found.facts.emplace_back("skipped", line);
  if (has(folder, kAdapterConfig)) {
    const Inspection adapter = inspect_adapter(folder);
    found.facts.emplace_back("adapter", !adapter.damage.empty() ? "damaged" : adapter.is_verified ? "whole" : "not verifiable");
    for (const std::string& line : adapter.damage) found.damage.push_back(message("adapter: {}", line));
    for (const auto& fact : adapter.facts) {
      if (fact.first == kChecksums || fact.first == kChanged || fact.first == kUnknown) found.facts.push_back(fact);
    }
    found.loads_in = adapter.loads_in;
    found.is_verified = adapter.is_verified;
  }
  return found;
}

/// By its name or its manifest. Without either, an output whose manifest is damaged.
bool is_checkpoint(const std::string& folder) {
  if (has(folder, "run_state.json") || files::file_name(folder).starts_with("checkpoint-")) return true;
  if (!has(folder, files::kManifestName)) return false;
  try {
    return files::read_manifest(folder).kind != files::kOutputKind;
  } catch (const Error&) { return !has(folder, kAdapterConfig) && !has(folder, "config.json"); }
}

}  // namespace

Inspection inspect(const std::string& folder) {
  QLORAPP_CHECK_VALUE(files::is_folder(folder),
                      "[inspect] {} must be a folder: a model, an adapter, a checkpoint or an output folder.", folder);
  if (is_checkpoint(folder)) return inspect_checkpoint(folder);
  if (has(folder, "run.json") || !list_checkpoints(folder).empty()) return inspect_run(folder);
  if (has(folder, "config.json")) return inspect_model(folder);
  if (has(folder, kAdapterConfig) || has(folder, kAdapterWeights) || has(folder, ".qlorapp-pending"))
    return inspect_adapter(folder);
  throw ValueError(
      message("[inspect] {} is no model, adapter, checkpoint or output folder: it has no config.json, adapter_config.json, "
              "MANIFEST.json or run.json.",
              folder));
}

}  // namespace qlorapp
