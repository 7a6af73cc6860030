// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "adapter_file.hpp"
#include "adapter_tensors.hpp"
#include "core/check.hpp"
#include "export_targets.hpp"
#include "files/folder.hpp"
#include "format/gguf.hpp"
#include "format/model_folder.hpp"
#include "gguf_model.hpp"
#include "io/stored_names.hpp"
#include "io/tensor_file.hpp"
#include "qlorapp/format/model_layout.hpp"

namespace qlorapp {
namespace {

using format::Role;

constexpr std::string_view kMergedInstead = "Export the merged model (--gguf), which holds it.";

/// One of the two factors of a part.
struct Factor {
  const GgufPart* part;
  std::string module;
  const AdaptedModule* lora;
  bool is_b;
};

class AdapterExporter {
 public:
  AdapterExporter(const std::string& model, const std::string& adapter, std::string_view type)
      : config_(format::settled_config(model)),
        parts_(gguf_parts(config_)),
        adapter_(open_adapter(adapter, format::AdapterUse::kMerge)),
        modules_(adapter_tensors(adapter_)),
        type_(type_of(type)) {
    check_adapter(model, adapter);
    std::vector<std::string> names;
    for (const auto& [name, module] : modules_.modules) names.push_back(name + ".weight");
    const StoredNames stored(names);
    std::set<std::string> found;
    for (const GgufPart& part : parts_) {
      const std::string* const name = part.parameter.empty() ? nullptr : stored.find(part.parameter);
      if (name == nullptr) continue;
      found.insert(*name);
      const std::string module = name->substr(0, name->size() - kWeightSuffix.size());
      const AdaptedModule& lora = modules_.modules.at(module);
      check_part(part, lora);
      for (const bool is_b : {false, true}) factors_.push_back({&part, module, &lora, is_b});
    }
    for (const std::string& name : names) {
      QLORAPP_CHECK_FORMAT(found.contains(name), "[export] {}: llama.cpp has no tensor for the adapter of '{}'. {}", adapter,
                           name.substr(0, name.size() - kWeightSuffix.size()), kMergedInstead);
    }
  }

  void write(const std::string& model, const std::string& adapter, const std::string& file) const {
    std::vector<format::GgufTensor> tensors;
    for (const Factor& factor : factors_) {
      tensors.push_back({factor.part->name + (factor.is_b ? ".lora_b" : ".lora_a"), values_of(factor).sizes().vec(), type_});
    }
    const format::GgufMetadata metadata{{"general.architecture", std::string(config_.family->gguf.architecture)},
                                        {"general.type", std::string("adapter")},
                                        {"general.name", files::file_name(adapter)},
                                        {"general.base_model.count", uint32_t{1}},
                                        {"general.base_model.0.name", files::file_name(model)},
                                        {"adapter.type", std::string("lora")},
                                        {"adapter.lora.alpha", static_cast<float>(adapter_.lora.lora_alpha)}};
    format::GgufWriter writer(file, metadata, tensors);
    for (const Factor& factor : factors_) writer.write(bytes_of(values_of(factor).to(dtype()).contiguous()));
    adapter_.file.check_unchanged();
    writer.finish();
  }

 private:
  static format::GgufType type_of(std::string_view name) {
    if (name.empty()) return format::GgufType::kF32;
    for (const auto type : {format::GgufType::kF32, format::GgufType::kF16, format::GgufType::kBF16}) {
      if (name == format::block_of(type).name) return type;
    }
    throw ValueError(message("[export] type of an adapter must be F32, F16 or BF16; got '{}'.", name));
  }
  [[nodiscard]] at::ScalarType dtype() const {
    return type_ == format::GgufType::kF32 ? at::kFloat : type_ == format::GgufType::kF16 ? at::kHalf : at::kBFloat16;
  }

  /// Whether a saved tensor is the table beside whose adapter PEFT saves it, as the base has it.
  [[nodiscard]] bool is_of_base(const std::string& model, const std::string& name, const format::TensorEntry& entry) const {
    const bool beside = name.ends_with(kWeightSuffix) && modules_.modules.contains(name.substr(0, name.size() - kWeightSuffix.size()));
    if (!beside || !format::TensorFiles::are_in(model)) return false;
    const format::ModelFolder base = format::open_model_folder(model);
    const format::TensorLocation* const own = base.tensors.find(name);
    if (own == nullptr || own->tensor->shape != entry.shape) return false;
    return at::equal(read_tensor(*own).to(at::kFloat), read_tensor(adapter_.file, entry).to(at::kFloat));
  }

  /// What a server of llama.cpp's format would leave out.
  void check_adapter(const std::string& model, const std::string& folder) const {
    QLORAPP_CHECK_FORMAT(!modules_.modules.empty(), "[export] {} must hold low-rank matrices; it holds none. {}", folder,
                         kMergedInstead);
    for (const auto& [name, entry] : modules_.saved) {
      QLORAPP_CHECK_FORMAT(is_of_base(model, name, *entry),
                           "[export] {}: llama.cpp's adapters hold low-rank matrices alone; it holds '{}'. {}", folder, entry->name,
                           kMergedInstead);
    }
    QLORAPP_CHECK_FORMAT(!adapter_.config.base_fingerprint,
                         "[export] {} belongs to the base that its initialization changed, which no other program has. {}", folder,
                         kMergedInstead);
    for (const auto& [name, module] : modules_.modules) {
      for (const format::TensorEntry* const other : {module.bias, module.magnitude}) {
        QLORAPP_CHECK_FORMAT(other == nullptr, "[export] {}: llama.cpp's adapters hold low-rank matrices alone; it holds '{}'. {}",
                             folder, other->name, kMergedInstead);
      }
    }
  }

  void check_part(const GgufPart& part, const AdaptedModule& lora) const {
    const std::string& path = adapter_.file.path();
    QLORAPP_CHECK_FORMAT(part.role == Role::kLinear || part.role == Role::kHead || part.role == Role::kEmbedding,
                         "[export] {}: llama.cpp has no adapter for '{}'. {}", path, lora.a->name, kMergedInstead);
    QLORAPP_CHECK_FORMAT(part.role != Role::kEmbedding || !config_.tie_word_embeddings,
                         "[export] {}: llama.cpp has no adapter for tables that embedding and head share, as '{}' is. {}", path,
                         lora.a->name, kMergedInstead);
    std::vector<int64_t> expected = part.shape;
    expected[0] = part.parameter_rows;
    const std::vector<int64_t> found =
        lora.embedding ? std::vector{lora.a->shape[1], lora.b->shape[0]} : std::vector{lora.b->shape[0], lora.a->shape[1]};
    QLORAPP_CHECK_FORMAT(found == expected,
                         "[export] {}: '{}' must be of a weight of shape {}; it is of {}. Is it the adapter of another base?", path,
                         lora.a->name, joined(expected), joined(found));
  }

  /// Rows of B in the part's order, scaled so that alpha / rank is all that is left to do. llama.cpp looks rows of A up in an embedding.
  [[nodiscard]] at::Tensor values_of(const Factor& factor) const {
    const at::Tensor values = read_value(adapter_.file, (factor.is_b ? factor.lora->b : factor.lora->a)->name);
    if (!factor.is_b) return factor.lora->embedding ? values.t() : values;
    const double left = adapter_.lora.scaling_of(factor.module) * static_cast<double>(values.size(1)) / adapter_.lora.lora_alpha;
    const at::Tensor rows = factor.lora->embedding ? values : rows_of(*factor.part, values);
    return left == 1 ? rows : rows.mul(left);
  }

  format::ModelConfig config_;
  std::vector<GgufPart> parts_;
  AdapterFile adapter_;
  AdapterTensors modules_;
  format::GgufType type_;
  std::vector<Factor> factors_;
};

}  // namespace

void export_gguf_adapter(const std::string& model, const std::string& adapter, const std::string& file, const std::string& type) {
  AdapterExporter(model, adapter, type).write(model, adapter, file);
}

}  // namespace qlorapp
