// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/io/merge.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdio>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "adapter_file.hpp"
#include "adapter_tensors.hpp"
#include "adapters/merged_weight.hpp"
#include "core/check.hpp"
#include "files/atomic_file.hpp"
#include "files/folder.hpp"
#include "format/quant_state.hpp"
#include "format/tensor_files.hpp"
#include "io/adapter_base.hpp"
#include "io/finite.hpp"
#include "io/linear_weight.hpp"
#include "io/tensor_file.hpp"
#include "io/tensor_stream.hpp"
#include "json/python_json.hpp"
#include "merge_tensors.hpp"
#include "merged_folder.hpp"
#include "nn/arriving_weights.hpp"
#include "nn/base_fingerprint.hpp"
#include "ops/memory_tape.hpp"
#include "qlorapp/format/model_layout.hpp"
#include "qlorapp/json/json.hpp"
#include "stored_names.hpp"

namespace qlorapp {
namespace {

void write_values(format::SafetensorsWriter& writer, const at::Tensor& values) {
  writer.write({static_cast<const std::byte*>(values.const_data_ptr()), values.nbytes()});
}

std::vector<std::string> names_of(const format::TensorFiles& files) {
  std::vector<std::string> names;
  for (const format::TensorLocation& location : files.tensors()) names.push_back(location.tensor->name);
  return names;
}

class Merger {
 public:
  Merger(const std::string& model, const std::string& adapter, const MergeOptions& options)
      : files_(model),
        config_(read_base_config(model)),
        adapter_folder_(adapter),
        adapter_(open_adapter(adapter, format::AdapterUse::kMerge)),
        parts_(adapter_tensors(adapter_)),
        options_(options),
        quantizer_(options.quantization),
        stored_names_(names_of(files_)) {
    QLORAPP_CHECK_FORMAT(
        parts_.modules.empty() || std::any_of(parts_.modules.begin(), parts_.modules.end(),
                                              [&](const auto& part) { return adapter_.lora.matches(part.first); }),
        "[{}] target_modules must name the layers of the adapter's weights; it names none of them, such as '{}'. Is "
        "it the config of another adapter?",
        files::path_in(adapter, kAdapterConfig), parts_.modules.begin()->first);
    if (adapter_.is_as_written) check_adapter_base(adapter, files_);
    const auto stored = std::find_if(files_.tensors().begin(), files_.tensors().end(),
                                     [&](const auto& location) { return format::is_quantized(files_, location.tensor->name); });
    const bool has_codes = stored != files_.tensors().end();
    QLORAPP_CHECK_VALUE(!has_codes || options.base != MergeBase::kOriginal,
                        "[merge] base=original needs the unquantized weights; {} is stored in four bits ({}). Give the model that "
                        "it was quantized from, or base=dequantized.",
                        model, stored->tensor->name);
    const auto turned = adapter_.config.preserved.find("fan_in_fan_out");
    QLORAPP_CHECK_VALUE(
        !has_codes || turned == adapter_.config.preserved.end() || turned->second != "true",
        "[merge] layers that are stored as (in, out) (fan_in_fan_out, Conv1D) must be in 16 or 32 bits; {} holds them "
        "in four, transposed. {}",
        model, format::kMergeInPython);
    if (adapter_.config.base_fingerprint) check_fingerprint(adapter_.config, adapter, fingerprint_text(fingerprint(model)));
    std::optional<format::Dtype> dtype;
    if (options.dtype) dtype = format_dtype_of(*options.dtype);
    result_ = merged_tensors(files_, config_, adapter_, parts_, dtype,
                             [this](const auto& a, const auto& b) { return have_same_values(a, b); });
    dtype_name_ = format::torch_name(dtype.value_or(main_dtype()));
    if (!has_codes && options.base == MergeBase::kDequantized) quantize_first(model);
  }

  void write(const std::string& output) {
    files::make_folders("merge", output);
    write_shards(output);
    for (const format::SafetensorsFile& file : files_.files()) file.check_unchanged();
    adapter_.file.check_unchanged();
    write_files_beside_weights(files_.folder(), adapter_folder_, output, {dtype_name_, result_.separates_head, result_.vocab_size});
  }

 private:
  /// The config's, or else that of the largest tensor.
  [[nodiscard]] format::Dtype main_dtype() const {
    if (config_.dtype) return *config_.dtype;
    const MergedTensor* largest = nullptr;
    for (const MergedTensor& tensor : result_.tensors) {
      const bool named = is_wide_float(tensor.dtype) && tensor.dtype != format::Dtype::kF64;
      if (named && (largest == nullptr || tensor.numel() > largest->numel())) largest = &tensor;
    }
    return largest == nullptr ? format::Dtype::kF32 : largest->dtype;
  }

  /// Of a layer's weight: files of a model without its head have no "model." in front, those of a wrapper other words.
  [[nodiscard]] const std::string& stored_name(const format::Parameter& linear) const {
    const std::string* const name = stored_names_.find(linear.name());
    QLORAPP_CHECK_FORMAT(name != nullptr, "[merge] {} must hold '{}', as its config.json says. Use the whole checkpoint.",
                         files_.folder(), linear.name());
    return *name;
  }

  /// Of the codes as they are stored; a base whose codes are still to be made is another than the one that the adapter names.
  [[nodiscard]] uint64_t fingerprint(const std::string& model) const {
    FourBitFingerprint fingerprint;
    for (const format::Parameter& linear : format::parameters(format::load_model_config(model), format::Role::kLinear)) {
      const std::string name = stored_name(linear);
      if (format::is_quantized(files_, name)) fingerprint.add(read_quantized(name, linear.shape));
    }
    return fingerprint.value();
  }

  /// Marks the layers that training quantized, which only a known family tells.
  void quantize_first(const std::string& model) {
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

  [[nodiscard]] static at::Tensor buffer(at::ScalarType type) {
    return at::empty({kMergeBufferBytes / static_cast<int64_t>(c10::elementSize(type))}, at::TensorOptions().dtype(type));
  }

  /// What of the tensor fits the buffer.
  [[nodiscard]] static at::Tensor piece(const format::TensorLocation& from, int64_t offset, const at::Tensor& buffer) {
    const int64_t bytes = std::min(static_cast<int64_t>(buffer.nbytes()), from.tensor->nbytes - offset);
    from.file->read(*from.tensor, offset, {static_cast<std::byte*>(buffer.mutable_data_ptr()), static_cast<size_t>(bytes)});
    return buffer.narrow(0, 0, bytes / static_cast<int64_t>(buffer.element_size()));
  }

  [[nodiscard]] static bool have_same_values(const format::TensorLocation& a, const format::TensorLocation& b) {
    bool same = a.tensor->dtype == b.tensor->dtype && a.tensor->shape == b.tensor->shape;
    if (!same) return false;
    const at::Tensor both = buffer(at::kByte), left = both.narrow(0, 0, both.numel() / 2),
                     right = both.narrow(0, left.numel(), left.numel());
    for (int64_t offset = 0; same && offset < a.tensor->nbytes; offset += static_cast<int64_t>(left.nbytes())) {
      same = at::equal(piece(a, offset, left), piece(b, offset, right));
    }
    return same;
  }

  static void check_values(const at::Tensor& values, const std::string& name, const std::string& path) {
    QLORAPP_CHECK_FORMAT(all_finite(values),
                         "[merge] {}: tensor '{}' must be finite in {}; it has inf or nan. Either the file is damaged, or its "
                         "values need a wider dtype.",
                         path, name, format::torch_name(format_dtype_of(values.scalar_type())));
  }

  void copy(const MergedTensor& output, format::SafetensorsWriter& writer) const {
    const format::TensorEntry& entry = *output.from.tensor;
    const bool converts = is_wide_float(entry.dtype) && (entry.dtype != format::Dtype::kF64 || output.dtype != entry.dtype);
    const at::Tensor stored = buffer(converts ? scalar_type_of(entry.dtype, entry.name) : at::kByte);
    for (int64_t offset = 0; offset < entry.nbytes; offset += static_cast<int64_t>(stored.nbytes())) {
      at::Tensor values = piece(output.from, offset, stored);
      if (converts) {
        values = values.to(scalar_type_of(output.dtype, output.name));
        check_values(values, entry.name, output.from.file->path());
      }
      write_values(writer, values);
    }
  }

  [[nodiscard]] QuantizedTensor read_quantized(const std::string& name, const std::vector<int64_t>& shape) const {
    std::vector<StreamedTensor> parts;
    QuantizedTensor weight = stream_quantized(parts, files_, name, shape);
    stream_tensors(std::move(parts), at::kCPU);
    return weight;
  }

  [[nodiscard]] LoraAdapter read_adapter(const MergedTensor& output) const {
    const AdaptedModule& lora = *output.lora;
    LoraAdapter adapter;
    adapter.a = read_value(adapter_.file, lora.a->name);
    adapter.b = read_value(adapter_.file, lora.b->name);
    adapter.scaling = adapter_.lora.scaling_of(output.module);
    if (lora.magnitude != nullptr) adapter.magnitude = read_value(adapter_.file, lora.magnitude->name);
    return adapter;
  }

  [[nodiscard]] at::Tensor merged(const MergedTensor& output, at::ScalarType dtype) const {
    if (output.added_bias != nullptr) {
      const at::Tensor added = read_value(adapter_.file, output.added_bias->name);
      return read_tensor(output.from).to(at::kFloat).add_(added, adapter_.lora.scaling_of(output.module)).to(dtype);
    }
    std::optional<LoraAdapter> adapter;
    if (output.lora != nullptr) adapter = read_adapter(output);
    const Quantizer* const quantizer = output.quantized_first ? &quantizer_ : nullptr;
    if (output.from.tensor == nullptr)
      return merged_weight(FrozenWeight(read_quantized(output.name, output.shape)), adapter ? &*adapter : nullptr, quantizer,
                           dtype);
    at::Tensor weight = read_tensor(find_checked(output));
    if (!output.transposed) return merged_weight(FrozenWeight(std::move(weight)), adapter ? &*adapter : nullptr, quantizer, dtype);
    weight = weight.t();
    return merged_weight(FrozenWeight(std::move(weight)), &*adapter, quantizer, dtype).t().contiguous();
  }

  static const format::TensorLocation& find_checked(const MergedTensor& output) {
    QLORAPP_CHECK_FORMAT(is_wide_float(output.from.tensor->dtype),
                         "[merge] {}: tensor '{}' must be float32, float16 or bfloat16; got {}.", output.from.file->path(),
                         output.from.tensor->name, format::dtype_name(output.from.tensor->dtype));
    return output.from;
  }

  void merge(const MergedTensor& output, format::SafetensorsWriter& writer) const {
    at::Tensor values;
    try {
      values = merged(output, scalar_type_of(output.dtype, output.name));
    } catch (const IoError&) { throw; } catch (const FormatError&) {
      throw;
    } catch (const Error& error) {
      throw FormatError(message("[merge] tensor '{}' cannot be merged: {}", output.name, error.what()));
    }
    check_values(values, output.name, output.from.file == nullptr ? files_.folder() : output.from.file->path());
    write_values(writer, values);
  }

  /// In the order of names, each as full as it may be.
  [[nodiscard]] std::vector<std::vector<const MergedTensor*>> shards() const {
    std::vector<std::vector<const MergedTensor*>> shards(1);
    int64_t size = 0;
    for (const MergedTensor& output : result_.tensors) {
      const int64_t bytes = output.nbytes();
      if (!shards.back().empty() && size + bytes > options_.max_shard_size.count) {
        shards.emplace_back();
        size = 0;
      }
      shards.back().push_back(&output);
      size += bytes;
    }
    return shards;
  }

  void write_shards(const std::string& folder) const {
    const auto shards = this->shards();
    format::Json weight_map = format::Json::object();
    int64_t parameters = 0, bytes = 0, done = 0;
    for (size_t i = 0; i < shards.size(); ++i) {
      std::array<char, 64> name{};
      std::snprintf(name.data(), name.size(), "model-%05zu-of-%05zu.safetensors", i + 1, shards.size());
      const std::string file = shards.size() == 1 ? "model.safetensors" : name.data();
      std::vector<format::TensorSpec> specs;
      std::map<std::string_view, const MergedTensor*> by_name;
      for (const MergedTensor* output : shards[i]) {
        specs.push_back({output->name, output->dtype, output->shape});
        by_name[output->name] = output;
        weight_map[output->name] = file;
        parameters += output->numel();
        bytes += output->nbytes();
      }
      format::SafetensorsWriter writer(files::path_in(folder, file), std::move(specs), {{"format", "pt"}});
      for (const format::TensorEntry& entry : writer.tensors()) {
        const MergedTensor& output = *by_name.at(entry.name);
        output.is_copied() ? copy(output, writer) : merge(output, writer);
        if (options_.progress) options_.progress(++done, std::ssize(result_.tensors));
      }
      writer.finish();
    }
    if (shards.size() == 1) return;
    format::Json index = format::Json::object();
    index["metadata"] = {{"total_parameters", parameters}, {"total_size", bytes}};
    index["weight_map"] = std::move(weight_map);
    files::write_file_atomically(files::path_in(folder, "model.safetensors.index.json"),
                                 format::dump_python_json(index, format::kConfigStyle) + "\n");
  }

  format::TensorFiles files_;
  BaseConfig config_;
  std::string adapter_folder_;
  AdapterFile adapter_;
  AdapterTensors parts_;
  const MergeOptions& options_;
  Quantizer quantizer_;
  StoredNames stored_names_;
  MergedTensors result_;
  std::string dtype_name_;
};

}  // namespace

std::string_view to_string(MergeBase base) { return base == MergeBase::kOriginal ? "original" : "dequantized"; }

MergeBase parse_merge_base(std::string_view text) {
  for (const MergeBase base : {MergeBase::kOriginal, MergeBase::kDequantized}) {
    if (text == to_string(base)) return base;
  }
  throw ValueError(message("[merge] base must be original or dequantized; got '{}'.", text));
}

void merge_adapter(const std::string& model, const std::string& adapter, const std::string& output, const MergeOptions& options) {
  const at::NoGradGuard no_grad;
  QLORAPP_CHECK_VALUE(options.max_shard_size.count > 0, "[merge] max_shard_size must be above 0; got {}.",
                      options.max_shard_size.count);
  files::FreshFolder fresh(output);
  ops::mark_phase(ops::MemoryPhase::kMerge);
  Merger(model, adapter, options).write(fresh.path());
  fresh.keep();
}

}  // namespace qlorapp
