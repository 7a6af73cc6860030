// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "adapter_file.hpp"
#include "adapter_modules.hpp"
#include "adapter_tensors.hpp"
#include "core/check.hpp"
#include "export_targets.hpp"
#include "files/folder.hpp"
#include "format/gguf.hpp"
#include "format/gguf_model.hpp"
#include "format/model_folder.hpp"
#include "gguf_rows.hpp"
#include "io/tensor_file.hpp"
#include "qlorapp/format/model_layout.hpp"
#include "qlorapp/io/gguf.hpp"

namespace qlorapp {
namespace {

using format::Role;

constexpr std::string_view kMergedInstead = "Export the merged model (--gguf), which holds it.";

/// One of the two factors of a part.
struct Factor {
  const format::GgufPart* part;
  const AdapterModules::Found* found;
  bool is_b;
};

class AdapterExporter {
 public:
  AdapterExporter(const std::string& model, const std::string& adapter, std::string_view type)
      : config_(format::settled_config(model)),
        parts_(format::gguf_parts(config_)),
        adapter_(open_adapter(adapter, format::AdapterUse::kMerge)),
        modules_(adapter_tensors(adapter_)),
        places_(adapter_modules(config_, adapter_, modules_)),
        type_(type_of(type)) {
    check_adapter(model, adapter);
    for (const format::GgufPart& part : parts_) {
      const auto found = places_.found.find(part.parameter);
      if (found == places_.found.end()) continue;
      for (const bool is_b : {false, true}) factors_.push_back({&part, &found->second, is_b});
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
                                        {"general.base_model.0.name", files::file_name(model_path(model))},
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

  /// What a server of llama.cpp's format would leave out.
  void check_adapter(const std::string& model, const std::string& folder) const {
    QLORAPP_CHECK_FORMAT(!modules_.modules.empty(), "[export] {} must hold low-rank matrices; it holds none. {}", folder,
                         kMergedInstead);
    for (const auto& [name, entry] : modules_.saved) {
      QLORAPP_CHECK_FORMAT(is_table_of_base(model, adapter_, modules_, name),
                           "[export] {}: llama.cpp's adapters hold low-rank matrices alone; it holds '{}'. {}", folder, entry->name,
                           kMergedInstead);
    }
    QLORAPP_CHECK_FORMAT(!adapter_.config.base_fingerprint,
                         "[export] {} belongs to the base that its initialization changed, which no other program has. {}", folder,
                         kMergedInstead);
    QLORAPP_CHECK_FORMAT(places_.others.empty(), "[export] {}: llama.cpp has no tensor for the adapter of '{}'. {}", folder,
                         joined(places_.others), kMergedInstead);
    for (const auto& [name, place] : places_.found) {
      QLORAPP_CHECK_FORMAT(place.parameter.role == Role::kLinear || !config_.tie_word_embeddings,
                           "[export] {}: llama.cpp has no adapter for tables that embedding and head share, as '{}' is. {}", folder,
                           place.lora->a->name, kMergedInstead);
    }
    for (const auto& [name, module] : modules_.modules) {
      for (const format::TensorEntry* const other : {module.bias, module.magnitude}) {
        QLORAPP_CHECK_FORMAT(other == nullptr, "[export] {}: llama.cpp's adapters hold low-rank matrices alone; it holds '{}'. {}",
                             folder, other->name, kMergedInstead);
      }
    }
  }

  /// Rows of B in the part's order, scaled so that alpha / rank is all that is left to do. llama.cpp looks rows of A up in an embedding.
  [[nodiscard]] at::Tensor values_of(const Factor& factor) const {
    const at::Tensor values = read_value(adapter_.file, (factor.is_b ? factor.found->lora->b : factor.found->lora->a)->name);
    if (!factor.is_b) return factor.found->lora->embedding ? values.t() : values;
    const double left =
        adapter_.lora.scaling_of(factor.found->module) * static_cast<double>(values.size(1)) / adapter_.lora.lora_alpha;
    const at::Tensor rows = factor.found->lora->embedding ? values : rows_of(*factor.part, values);
    return left == 1 ? rows : rows.mul(left);
  }

  format::ModelConfig config_;
  std::vector<format::GgufPart> parts_;
  AdapterFile adapter_;
  AdapterTensors modules_;
  AdapterModules places_;
  format::GgufType type_;
  std::vector<Factor> factors_;
};

}  // namespace

void export_gguf_adapter(const std::string& model, const std::string& adapter, const std::string& file, const std::string& type) {
  AdapterExporter(model, adapter, type).write(model, adapter, file);
}

}  // namespace qlorapp
