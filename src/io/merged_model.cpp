// SPDX-License-Identifier: Apache-2.0
#include "merged_model.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <set>
#include <string_view>
#include <utility>

#include "adapters/merged_weight.hpp"
#include "core/check.hpp"
#include "files/folder.hpp"
#include "format/quant_state.hpp"
#include "io/adapter_base.hpp"
#include "io/finite.hpp"
#include "io/linear_weight.hpp"
#include "io/tensor_file.hpp"
#include "io/tensor_stream.hpp"
#include "nn/arriving_weights.hpp"
#include "nn/base_fingerprint.hpp"
#include "qlorapp/format/model_layout.hpp"

namespace qlorapp {
namespace {

template <class Tensors>
std::vector<std::string> names_of(const Tensors& tensors) {
  std::vector<std::string> names;
  for (const auto& tensor : tensors) {
    if constexpr (requires { tensor.tensor; }) names.push_back(tensor.tensor->name);
    else names.push_back(tensor.name);
  }
  return names;
}

at::Tensor buffer(at::ScalarType type) {
  return at::empty({kMergeBufferBytes / static_cast<int64_t>(c10::elementSize(type))}, at::TensorOptions().dtype(type));
}

/// What of the tensor fits the buffer.
at::Tensor piece(const format::TensorLocation& from, int64_t offset, const at::Tensor& buffer) {
  const int64_t bytes = std::min(static_cast<int64_t>(buffer.nbytes()), from.tensor->nbytes - offset);
  from.file->read(*from.tensor, offset, {static_cast<std::byte*>(buffer.mutable_data_ptr()), static_cast<size_t>(bytes)});
  return buffer.narrow(0, 0, bytes / static_cast<int64_t>(buffer.element_size()));
}

bool have_same_values(const format::TensorLocation& a, const format::TensorLocation& b) {
  bool same = a.tensor->dtype == b.tensor->dtype && a.tensor->shape == b.tensor->shape;
  if (!same) return false;
  const at::Tensor both = buffer(at::kByte), left = both.narrow(0, 0, both.numel() / 2),
                   right = both.narrow(0, left.numel(), left.numel());
  for (int64_t offset = 0; same && offset < a.tensor->nbytes; offset += static_cast<int64_t>(left.nbytes())) {
    same = at::equal(piece(a, offset, left), piece(b, offset, right));
  }
  return same;
}

void check_values(const at::Tensor& values, const std::string& name, const std::string& path) {
  QLORAPP_CHECK_FORMAT(all_finite(values),
                       "[merge] {}: tensor '{}' must be finite in {}; it has inf or nan. Either the file is damaged, or its "
                       "values need a wider dtype.",
                       path, name, format::torch_name(format_dtype_of(values.scalar_type())));
}

const format::TensorLocation& find_checked(const MergedTensor& output) {
  QLORAPP_CHECK_FORMAT(is_wide_float(output.from.tensor->dtype),
                       "[merge] {}: tensor '{}' must be float32, float16 or bfloat16; got {}.", output.from.file->path(),
                       output.from.tensor->name, format::dtype_name(output.from.tensor->dtype));
  return output.from;
}

}  // namespace

MergedModel::MergedModel(const std::string& model, const std::string& adapter, const MergeOptions& options)
    : files_(model),
      config_(read_base_config(model)),
      options_(options),
      quantizer_(options.quantization),
      stored_names_(names_of(files_.tensors())) {
  if (!adapter.empty()) {
    adapter_.emplace(open_adapter(adapter, format::AdapterUse::kMerge));
    parts_ = adapter_tensors(*adapter_);
    QLORAPP_CHECK_FORMAT(
        parts_.modules.empty() || std::any_of(parts_.modules.begin(), parts_.modules.end(),
                                              [&](const auto& part) { return adapter_->lora.matches(part.first); }),
        "[{}] target_modules must name the layers of the adapter's weights; it names none of them, such as '{}'. Is "
        "it the config of another adapter?",
        files::path_in(adapter, kAdapterConfig), parts_.modules.begin()->first);
    if (adapter_->is_as_written) check_adapter_base(adapter, files_);
  }
  const auto stored = std::find_if(files_.tensors().begin(), files_.tensors().end(),
                                   [&](const auto& location) { return format::is_quantized(files_, location.tensor->name); });
  const bool has_codes = stored != files_.tensors().end();
  QLORAPP_CHECK_VALUE(!has_codes || options.base != MergeBase::kOriginal,
                      "[merge] base=original needs the unquantized weights; {} is stored in four bits ({}). Give the model that "
                      "it was quantized from, or base=dequantized.",
                      model, stored->tensor->name);
  std::optional<format::Dtype> dtype;
  if (options.dtype) dtype = format_dtype_of(*options.dtype);
  if (adapter_) {
    const auto turned = adapter_->config.preserved.find("fan_in_fan_out");
    QLORAPP_CHECK_VALUE(
        !has_codes || turned == adapter_->config.preserved.end() || turned->second != "true",
        "[merge] layers that are stored as (in, out) (fan_in_fan_out, Conv1D) must be in 16 or 32 bits; {} holds them "
        "in four, transposed. {}",
        model, format::kMergeInPython);
    if (adapter_->config.base_fingerprint) check_fingerprint(adapter_->config, adapter, fingerprint_text(fingerprint(model)));
    result_ = merged_tensors(files_, config_, *adapter_, parts_, dtype, have_same_values);
  } else {
    result_ = base_tensors(files_, config_, dtype);
  }
  names_.emplace(names_of(result_.tensors));
  dtype_name_ = format::torch_name(dtype.value_or(main_dtype()));
  if (!has_codes && options.base == MergeBase::kDequantized) quantize_first(model);
}

/// The config's, or else that of the largest tensor.
format::Dtype MergedModel::main_dtype() const {
  if (config_.dtype) return *config_.dtype;
  const MergedTensor* largest = nullptr;
  for (const MergedTensor& tensor : result_.tensors) {
    const bool named = is_wide_float(tensor.dtype) && tensor.dtype != format::Dtype::kF64;
    if (named && (largest == nullptr || tensor.numel() > largest->numel())) largest = &tensor;
  }
  return largest == nullptr ? format::Dtype::kF32 : largest->dtype;
}

/// Of a layer's weight: files of a model without its head have no "model." in front, those of a wrapper other words.
const std::string& MergedModel::stored_name(const format::Parameter& linear) const {
  const std::string* const name = stored_names_.find(linear.name());
  QLORAPP_CHECK_FORMAT(name != nullptr, "[merge] {} must hold '{}', as its config.json says. Use the whole checkpoint.",
                       files_.folder(), linear.name());
  return *name;
}

/// Of the codes as they are stored; a base whose codes are still to be made is another than the one that the adapter names.
uint64_t MergedModel::fingerprint(const std::string& model) const {
  FourBitFingerprint fingerprint;
  for (const format::Parameter& linear : format::parameters(format::load_model_config(model), format::Role::kLinear)) {
    const std::string name = stored_name(linear);
    if (format::is_quantized(files_, name)) fingerprint.add(read_quantized(name, linear.shape));
  }
  return fingerprint.value();
}

/// Marks the layers that training quantized, which only a known family tells.
void MergedModel::quantize_first(const std::string& model) {
  std::optional<format::ModelConfig> config;
  try {
    config = format::load_model_config(model);
  } catch (const FormatError& error) {
    throw ValueError(
        message("[merge] base=dequantized of unquantized weights needs a model that this library computes: {} Merge into "
                "base=original, or give the four-bit checkpoint that training used (save_pretrained of its model).",
                error.what()));
  }
  std::set<std::string> linears;
  for (const format::Parameter& linear : format::parameters(*config, format::Role::kLinear)) {
    if (!names_module(options_.skip_modules, linear.module)) linears.insert(stored_name(linear));
  }
  for (MergedTensor& tensor : result_.tensors) tensor.quantized_first = linears.contains(tensor.name);
}

const MergedTensor* MergedModel::find(const std::string& name) const {
  const std::string* const stored = names_->find(name);
  if (stored == nullptr) return nullptr;
  const auto at = std::ranges::lower_bound(result_.tensors, *stored, {}, &MergedTensor::name);
  return &*at;
}

QuantizedTensor MergedModel::read_quantized(const std::string& name, const std::vector<int64_t>& shape) const {
  std::vector<StreamedTensor> parts;
  QuantizedTensor weight = stream_quantized(parts, files_, name, shape);
  stream_tensors(std::move(parts), at::kCPU);
  return weight;
}

LoraAdapter MergedModel::read_adapter(const MergedTensor& output) const {
  const AdaptedModule& lora = *output.lora;
  LoraAdapter adapter;
  adapter.a = read_value(adapter_->file, lora.a->name);
  adapter.b = read_value(adapter_->file, lora.b->name);
  adapter.scaling = adapter_->lora.scaling_of(output.module);
  if (lora.magnitude != nullptr) adapter.magnitude = read_value(adapter_->file, lora.magnitude->name);
  return adapter;
}

at::Tensor MergedModel::merged_values(const MergedTensor& output, at::ScalarType dtype) const {
  if (output.added_bias != nullptr) {
    const at::Tensor added = read_value(adapter_->file, output.added_bias->name);
    return read_tensor(output.from).to(at::kFloat).add_(added, adapter_->lora.scaling_of(output.module)).to(dtype);
  }
  std::optional<LoraAdapter> adapter;
  if (output.lora != nullptr) adapter = read_adapter(output);
  const Quantizer* const quantizer = output.quantized_first ? &quantizer_ : nullptr;
  if (output.from.tensor == nullptr)
    return merged_weight(FrozenWeight(read_quantized(output.name, output.shape)), adapter ? &*adapter : nullptr, quantizer, dtype);
  at::Tensor weight = read_tensor(find_checked(output));
  if (!output.transposed) return merged_weight(FrozenWeight(std::move(weight)), adapter ? &*adapter : nullptr, quantizer, dtype);
  weight = weight.t();
  return merged_weight(FrozenWeight(std::move(weight)), &*adapter, quantizer, dtype).t().contiguous();
}

at::Tensor MergedModel::merged(const MergedTensor& output, std::optional<at::ScalarType> dtype) const {
  at::Tensor values;
  try {
    values = merged_values(output, dtype ? *dtype : scalar_type_of(output.dtype, output.name));
  } catch (const IoError&) { throw; } catch (const FormatError&) {
    throw;
  } catch (const Error& error) {
    throw FormatError(message("[merge] tensor '{}' cannot be merged: {}", output.name, error.what()));
  }
  check_values(values, output.name, output.from.file == nullptr ? files_.folder() : output.from.file->path());
  return values;
}

at::Tensor MergedModel::values(const MergedTensor& output) const {
  if (!output.is_copied()) return merged(output, at::kFloat);
  at::Tensor values = read_tensor(find_checked(output));
  check_values(values, output.name, output.from.file->path());
  return values;
}

void MergedModel::read_pieces(const MergedTensor& output, const std::function<void(const at::Tensor&)>& take) const {
  const format::TensorEntry& entry = *output.from.tensor;
  const bool converts = is_wide_float(entry.dtype) && (entry.dtype != format::Dtype::kF64 || output.dtype != entry.dtype);
  const at::Tensor stored = buffer(converts ? scalar_type_of(entry.dtype, entry.name) : at::kByte);
  for (int64_t offset = 0; offset < entry.nbytes; offset += static_cast<int64_t>(stored.nbytes())) {
    at::Tensor values = piece(output.from, offset, stored);
    if (converts) {
      values = values.to(scalar_type_of(output.dtype, output.name));
      check_values(values, entry.name, output.from.file->path());
    }
    take(values);
  }
}

void MergedModel::check_unchanged() const {
  for (const auto& file : files_.files()) file->check_unchanged();
  if (adapter_) adapter_->file.check_unchanged();
}

}  // namespace qlorapp
