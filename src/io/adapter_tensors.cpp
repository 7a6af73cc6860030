// SPDX-License-Identifier: Apache-2.0
#include "adapter_tensors.hpp"

#include <array>
#include <string_view>
#include <utility>
#include <vector>

#include "adapters/adapter_set.hpp"
#include "core/check.hpp"

namespace qlorapp {
namespace {

struct Part {
  std::string_view suffix;
  const format::TensorEntry* AdaptedModule::*member;
  bool embedding;
};
constexpr std::array<Part, 7> kParts{{{".lora_A.weight", &AdaptedModule::a, false},
                                      {".lora_B.weight", &AdaptedModule::b, false},
                                      {".lora_B.bias", &AdaptedModule::bias, false},
                                      {".lora_magnitude_vector", &AdaptedModule::magnitude, false},
                                      {".lora_magnitude_vector.weight", &AdaptedModule::magnitude, false},
                                      {".lora_embedding_A", &AdaptedModule::a, true},
                                      {".lora_embedding_B", &AdaptedModule::b, true}}};

bool is_floating(format::Dtype dtype) {
  return dtype == format::Dtype::kF16 || dtype == format::Dtype::kBF16 || dtype == format::Dtype::kF32 ||
         dtype == format::Dtype::kF64;
}

/// The name of a tensor that is saved whole, without what PEFT's wrappers put into it; empty for one that is not used.
std::string plain_name(std::string name) {
  for (const std::string_view word : {".original_module.", ".modules_to_save.", ".base_layer."}) {
    const size_t at = name.find(word);
    if (at == std::string::npos) continue;
    if (word == ".original_module.") return {};
    name.replace(at, word.size(), ".");
  }
  return name;
}

class Sorter {
 public:
  explicit Sorter(const AdapterFile& adapter) : adapter_(adapter) {}

  AdapterTensors sort() {
    for (const format::TensorEntry& entry : adapter_.file.tensors()) add(entry);
    for (const auto& [name, module] : sorted_.modules) check(name, module);
    return std::move(sorted_);
  }

 private:
  void add(const format::TensorEntry& entry) {
    const std::string& path = adapter_.file.path();
    QLORAPP_CHECK_FORMAT(
        entry.name.starts_with(kPeftPrefix),
        "[adapter] {} holds '{}', which does not fit this model and adapter_config.json. Names of an adapter begin "
        "with '{}'.",
        path, entry.name, kPeftPrefix);
    QLORAPP_CHECK_FORMAT(is_floating(entry.dtype), "[adapter] {}: '{}' must be float32, float16 or bfloat16; got {}.", path,
                         entry.name, format::dtype_name(entry.dtype));
    std::string name = entry.name.substr(kPeftPrefix.size());
    for (const Part& part : kParts) {
      if (!name.ends_with(part.suffix)) continue;
      AdaptedModule& module = sorted_.modules[name.substr(0, name.size() - part.suffix.size())];
      module.*part.member = &entry;
      module.embedding |= part.embedding;
      return;
    }
    QLORAPP_CHECK_FORMAT(name.find(".lora_") == std::string::npos && name.find(".token_adapter.") == std::string::npos,
                         "[adapter] {} holds '{}', which does not fit this model and adapter_config.json. {}", path, entry.name,
                         format::kMergeInPython);
    const bool copy = name.find(".modules_to_save.") != std::string::npos;
    if (name = plain_name(std::move(name)); name.empty()) return;
    if (copy) sorted_.saved.emplace(std::move(name), &entry);
    else sorted_.saved[std::move(name)] = &entry;
  }

  void check(const std::string& name, const AdaptedModule& module) const {
    const bool dora = adapter_.lora.use_dora;
    const auto part = [&](const char* linear, const char* embedding) {
      return message("{}{}{}", kPeftPrefix, name, module.embedding ? embedding : linear);
    };
    const auto require = [&](const format::TensorEntry* entry, const std::string& wanted) {
      QLORAPP_CHECK_FORMAT(entry != nullptr,
                           "[adapter] {} lacks '{}', which adapter_config.json requires. Is it the adapter of another base model?",
                           adapter_.file.path(), wanted);
    };
    require(module.a, part(".lora_A.weight", ".lora_embedding_A"));
    require(module.b, part(".lora_B.weight", ".lora_embedding_B"));
    if (says_lora_bias() && !module.embedding) require(module.bias, part(".lora_B.bias (lora_bias)", ""));
    if (dora) require(module.magnitude, part(".lora_magnitude_vector", ".lora_magnitude_vector"));
    QLORAPP_CHECK_FORMAT(dora || module.magnitude == nullptr,
                         "[adapter] {} holds '{}', but adapter_config.json says use_dora: false. Correct the one that is wrong.",
                         adapter_.file.path(), module.magnitude->name);
    // Of experts it is a multiple of the config's, which is for who finds their weights to say.
    const bool agree = module.a->shape.size() == 2 && module.b->shape.size() == 2 && module.a->shape[0] == module.b->shape[1];
    const int64_t rank = agree ? module.a->shape[0] : adapter_.lora.rank_of(name);
    const auto check_shape = [&](const format::TensorEntry* entry, std::vector<int64_t> shape, size_t free) {
      if (entry == nullptr) return;
      if (free < shape.size() && entry->shape.size() == shape.size()) shape[free] = entry->shape[free];
      QLORAPP_CHECK_FORMAT(
          entry->shape == shape,
          "[adapter] {}: '{}' must have shape {} for this base model; got {}. It is the adapter of another base model or rank.",
          adapter_.file.path(), entry->name, joined(shape), joined(entry->shape));
    };
    constexpr size_t kNone = 2;
    check_shape(module.a, {rank, -1}, 1);
    check_shape(module.b, {-1, rank}, 0);
    check_shape(module.bias, {module.b->shape[0]}, kNone);
    check_shape(module.magnitude, {module.b->shape[0]}, kNone);
  }

  [[nodiscard]] bool says_lora_bias() const {
    const auto found = adapter_.config.preserved.find("lora_bias");
    return found != adapter_.config.preserved.end() && found->second == "true";
  }

  const AdapterFile& adapter_;
  AdapterTensors sorted_;
};

}  // namespace

AdapterTensors adapter_tensors(const AdapterFile& adapter) { return Sorter(adapter).sort(); }

}  // namespace qlorapp
