// SPDX-License-Identifier: Apache-2.0
#include "merge_tensors.hpp"

#include <algorithm>
#include <map>
#include <utility>

#include "adapters/adapter_set.hpp"
#include "core/check.hpp"
#include "core/nearest_name.hpp"
#include "format/quant_state.hpp"
#include "merge_tables.hpp"
#include "stored_names.hpp"

namespace qlorapp {
namespace {

std::string starred(std::string_view name) {
  std::string text;
  for (const char c : name) {
    if (c < '0' || c > '9') text += c;
    else if (text.empty() || text.back() != '*') text += '*';
  }
  return text;
}

/// Tensors of the base, one for a weight in four bits with all its parts.
std::vector<MergedTensor> stored_tensors(const format::TensorFiles& base, const BaseConfig& config,
                                         std::optional<format::Dtype> dtype) {
  std::vector<MergedTensor> tensors;
  std::string owner;  // of the parts that follow it in the order of names
  for (const format::TensorLocation& location : base.tensors()) {
    const std::string& name = location.tensor->name;
    if (!owner.empty() && name.starts_with(owner)) continue;
    if (name.ends_with("rotary_emb.inv_freq")) continue;  // computed, not loaded
    if (format::is_quantized(base, name)) {
      owner = name + ".";
      const format::QuantState state = format::find_quantized_weight(base, name).state;
      tensors.push_back({name, state.shape, dtype.value_or(config.dtype.value_or(state.dtype)), {}});
      continue;
    }
    const bool converts = dtype && is_wide_float(location.tensor->dtype);
    tensors.push_back({name, location.tensor->shape, converts ? *dtype : location.tensor->dtype, location});
  }
  return tensors;
}

class Matcher {
 public:
  Matcher(std::vector<MergedTensor>& tensors, const AdapterFile& adapter)
      : tensors_(tensors), adapter_(adapter), names_(names_of(tensors)) {
    for (size_t i = 0; i < tensors.size(); ++i) by_name_.emplace(tensors[i].name, i);
  }

  [[nodiscard]] MergedTensor* find(const std::string& name) {
    const std::string* stored = names_.find(name);
    return stored == nullptr ? nullptr : &tensors_[by_name_.at(*stored)];
  }

  void replace(const std::string& name, const format::TensorEntry& saved) {
    MergedTensor* const tensor = find(name);
    if (tensor == nullptr) fail_unknown(saved.name);
    // A table may have got rows; anything else is of one shape.
    std::vector<int64_t> shape = tensor->shape;
    if (shape.size() == 2 && saved.shape.size() == 2 && count_numbers(name) == 0 && name.ends_with(kWeightSuffix))
      shape[0] = saved.shape[0];
    check_shape(saved, shape, tensor->name);
    claim(*tensor, saved.name);
    tensor->shape = saved.shape;
    tensor->from = {&adapter_.file, &saved};
  }

  void adapt(const std::string& module, const AdaptedModule& lora) {
    MergedTensor* const tensor = find(message("{}{}", module, kWeightSuffix));
    if (tensor == nullptr) fail_no_weight(module, lora);
    set_lora(*tensor, module, lora);
    if (lora.bias == nullptr) return;
    MergedTensor* const bias = find(module + ".bias");
    QLORAPP_CHECK_FORMAT(bias != nullptr, "[merge] '{}' needs a bias in the base (lora_bias); {} has none.", lora.bias->name,
                         module);
    check_shape(*lora.bias, bias->shape, bias->name);
    bias->module = module;
    bias->added_bias = lora.bias;
  }

  void set_lora(MergedTensor& tensor, const std::string& module, const AdaptedModule& lora) {
    const std::vector<int64_t> straight{lora.b->shape[0], lora.a->shape[1]}, turned{straight[1], straight[0]};
    const bool fits = tensor.shape == straight || tensor.shape == turned;
    QLORAPP_CHECK_FORMAT(fits && !(lora.embedding && tensor.shape != turned),
                         "[adapter] {}: '{}' times lora_A must have shape {} for this base model; got {}. It is the adapter of "
                         "another base model.",
                         adapter_.file.path(), lora.b->name, joined(tensor.shape), joined(straight));
    const int64_t rank = adapter_.lora.rank_of(module);
    QLORAPP_CHECK_FORMAT(lora.a->shape[0] == rank, "[adapter] {}: '{}' must have shape {}, {} by adapter_config.json; got {}.",
                         adapter_.file.path(), lora.a->name, rank, straight[1], joined(lora.a->shape));
    QLORAPP_CHECK_FORMAT(tensor.lora == nullptr, "[merge] '{}' and '{}' of the adapter are both '{}' of the base. {}",
                         tensor.module, module, tensor.name, format::kMergeInPython);
    tensor.module = module;
    tensor.lora = &lora;
    tensor.transposed = tensor.shape != straight;
    if (lora.embedding) tensor.transposed = true;
    else if (straight != turned && count_numbers(module) > 0) (tensor.transposed ? turned_ : straight_) = true;
  }

  /// A square weight does not show how it is stored: the others do, or else the config.
  void orient_squares() {
    const auto flag = adapter_.config.preserved.find("fan_in_fan_out");
    const bool said = flag != adapter_.config.preserved.end() && flag->second == "true";
    for (MergedTensor& tensor : tensors_) {
      if (tensor.lora == nullptr || tensor.lora->embedding || tensor.shape[0] != tensor.shape[1]) continue;
      QLORAPP_CHECK_FORMAT(!(turned_ && straight_),
                           "[merge] whether '{}' is stored as (out, in) or (in, out) must follow from the other weights; they are "
                           "of both kinds. {}",
                           tensor.name, format::kMergeInPython);
      tensor.transposed = turned_ || (!straight_ && said);
    }
  }

  /// Of the modules that adapter_config.json names, each must be in the file.
  void check_complete() {
    const LoraConfig& lora = adapter_.lora;
    const bool listed = !lora.target_modules.pattern && !lora.target_modules.names.empty();
    if (!lora.target_modules.pattern && !listed) return;  // the family's own, which is PEFT's to know
    std::map<std::string, std::string, std::less<>> wrappers;
    std::set<std::string> kinds;
    for (const MergedTensor& tensor : tensors_) {
      if (tensor.lora == nullptr) continue;
      wrappers.emplace(split_name(tensor.name).wrappers, split_name(tensor.module + std::string(kWeightSuffix)).wrappers);
      kinds.insert(starred(tensor.module));
    }
    for (const MergedTensor& tensor : tensors_) {
      if (tensor.shape.size() != 2 || tensor.lora != nullptr || !tensor.name.ends_with(kWeightSuffix)) continue;
      const auto [stored, tail] = split_name(tensor.name);
      const auto known = wrappers.find(stored);
      const size_t numbers = count_numbers(tensor.name);
      if (known == wrappers.end() || numbers == 0) continue;
      std::string module = known->second.empty() ? std::string(tail) : message("{}.{}", known->second, tail);
      module.resize(module.size() - kWeightSuffix.size());
      const bool expected = kinds.contains(starred(module)) || (listed && numbers == 1);
      QLORAPP_CHECK_FORMAT(
          !expected || lora.saves(module) || !lora.matches(module),
          "[adapter] {} lacks '{}{}.lora_A.weight', which adapter_config.json requires. Is it the adapter of another "
          "base model?",
          adapter_.file.path(), kPeftPrefix, module);
    }
  }

  [[noreturn]] void fail_unknown(const std::string& name) const {
    std::vector<std::string_view> known;
    for (const MergedTensor& tensor : tensors_) known.push_back(tensor.name);
    throw FormatError(
        message("[adapter] {} holds '{}', which does not fit this model and adapter_config.json.{} Is it the adapter of "
                "another base model?",
                adapter_.file.path(), name, did_you_mean(name.substr(kPeftPrefix.size()), known)));
  }

 private:
  static std::vector<std::string> names_of(const std::vector<MergedTensor>& tensors) {
    std::vector<std::string> names;
    for (const MergedTensor& tensor : tensors) names.push_back(tensor.name);
    return names;
  }

  void check_shape(const format::TensorEntry& entry, const std::vector<int64_t>& shape, const std::string& stored) const {
    QLORAPP_CHECK_FORMAT(entry.shape == shape, "[adapter] {}: '{}' must have shape {} for this base model, as '{}' has; got {}.",
                         adapter_.file.path(), entry.name, joined(shape), stored, joined(entry.shape));
  }

  void claim(const MergedTensor& tensor, const std::string& by) const {
    QLORAPP_CHECK_FORMAT(tensor.from.file != &adapter_.file, "[merge] '{}' and '{}' of the adapter are both '{}' of the base. {}",
                         tensor.from.tensor->name, by, tensor.name, format::kMergeInPython);
  }

  [[noreturn]] void fail_no_weight(const std::string& module, const AdaptedModule& lora) const {
    const std::string inside = message(".{}.", module.substr(module.rfind('.') + 1));
    const bool experts = std::any_of(tensors_.begin(), tensors_.end(), [&](const MergedTensor& tensor) {
      return tensor.name.find(inside) != std::string::npos && !tensor.name.ends_with(inside);
    });
    if (!experts) fail_unknown(lora.a->name);
    throw FormatError(
        message("[merge] the adapter changes the parameters of '{}' as a whole (experts, target_parameters), which are not "
                "one weight of two dimensions in the base. {}",
                module, format::kMergeInPython));
  }

  std::vector<MergedTensor>& tensors_;
  const AdapterFile& adapter_;
  StoredNames names_;
  std::map<std::string, size_t, std::less<>> by_name_;
  bool straight_ = false, turned_ = false;  ///< There are layers whose weights are stored so.
};

}  // namespace

MergedTensors merged_tensors(const format::TensorFiles& base, const BaseConfig& config, const AdapterFile& adapter,
                             const AdapterTensors& parts, std::optional<format::Dtype> dtype, const SameValues& same) {
  MergedTensors result;
  std::vector<MergedTensor>& tensors = result.tensors;
  tensors = stored_tensors(base, config, dtype);
  MergeTables tables(tensors, config, adapter, parts, same);
  Matcher matcher(tensors, adapter);
  for (const auto& [name, saved] : parts.saved) matcher.replace(name, *saved);
  tables.share_saved();
  for (const auto& [module, lora] : parts.modules) matcher.adapt(module, lora);
  matcher.orient_squares();
  matcher.check_complete();
  tables.settle(result);
  std::sort(tensors.begin(), tensors.end(), [](const MergedTensor& a, const MergedTensor& b) { return a.name < b.name; });
  return result;
}

MergedTensors base_tensors(const format::TensorFiles& base, const BaseConfig& config, std::optional<format::Dtype> dtype) {
  MergedTensors result;
  result.tensors = stored_tensors(base, config, dtype);  // sorted, as the files' tensors are
  return result;
}

int64_t MergedTensor::numel() const {
  int64_t count = 1;
  for (const int64_t extent : shape) count *= extent;
  return count;
}

bool is_wide_float(format::Dtype dtype) {
  return dtype == format::Dtype::kF16 || dtype == format::Dtype::kBF16 || dtype == format::Dtype::kF32 ||
         dtype == format::Dtype::kF64;
}

}  // namespace qlorapp
