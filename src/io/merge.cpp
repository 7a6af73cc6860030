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
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "adapter_file.hpp"
#include "adapters/adapter_set.hpp"
#include "adapters/merged_weight.hpp"
#include "core/check.hpp"
#include "format/atomic_file.hpp"
#include "format/checkpoint_index.hpp"
#include "format/folder.hpp"
#include "format/python_json.hpp"
#include "format/quant_state.hpp"
#include "io/finite.hpp"
#include "io/linear_weight.hpp"
#include "io/tensor_file.hpp"
#include "io/tensor_stream.hpp"
#include "merged_folder.hpp"
#include "nn/arriving_weights.hpp"
#include "nn/base_fingerprint.hpp"
#include "nn/model_weights.hpp"
#include "ops/memory_tape.hpp"
#include "qlorapp/format/json.hpp"
#include "qlorapp/format/model_config.hpp"
#include "qlorapp/nn/causal_lm.hpp"

namespace qlorapp {
namespace {

constexpr std::string_view kEmbedding = "model.embed_tokens.weight", kHead = "lm_head.weight";

/// The adapter where it belongs, without memory: names, shapes and scalings of each layer, by the rules of those who train it.
CausalLM skeleton(const format::ModelConfig& config, const LoraConfig& lora) {
  const at::TensorOptions nowhere = at::TensorOptions().dtype(at::kFloat).device(at::kMeta);
  CausalLM model(
      config,
      make_weights(config, {[&](const std::string&, const std::vector<int64_t>& shape) { return at::empty(shape, nowhere); },
                            [&](FrozenWeight& into, const std::string&, int64_t out, int64_t in) {
                              into = FrozenWeight(at::empty({out, in}, nowhere));
                            }}));
  model.add_adapters(lora, /*seed=*/0);
  return model;
}

void write_values(format::SafetensorsWriter& writer, const at::Tensor& values) {
  writer.write({static_cast<const std::byte*>(values.const_data_ptr()), values.nbytes()});
}

/// One tensor of the new checkpoint.
struct Output {
  std::string name;
  std::vector<int64_t> shape;
  format::TensorLocation copied;         ///< From where, if it goes as it is; null for a merged weight.
  const LoraAdapter* adapter = nullptr;  ///< Of a merged weight: its scaling; null where there is only something to dequantize.

  [[nodiscard]] int64_t numel() const { return c10::multiply_integers(shape); }
};

class Merger {
 public:
  Merger(const std::string& model, const std::string& adapter, const MergeOptions& options)
      : checkpoint_(model),
        config_(format::load_model_config(model)),
        adapter_folder_(adapter),
        adapter_(open_adapter(adapter)),
        skeleton_(skeleton(config_, adapter_.lora)),
        options_(options),
        quantizer_(options.quantization) {
    check_names_and_shapes(skeleton_.adapters().active().named_tensors(), adapter_.file);
    const auto linears = format::linear_layers(config_);
    const auto stored = std::find_if(linears.begin(), linears.end(), [&](const format::ModelParameter& linear) {
      return format::is_quantized(checkpoint_, linear.name + ".weight");
    });
    QLORAPP_CHECK_VALUE(stored == linears.end() || options.base != MergeBase::kOriginal,
                        "[merge] base=original needs the unquantized weights; {} is stored in four bits ({}). Give the model that "
                        "it was quantized from, or base=dequantized.",
                        model, stored->name);
    quantizes_ = stored == linears.end() && options.base == MergeBase::kDequantized;
    if (adapter_.config.base_fingerprint) check_fingerprint(adapter_.config, adapter, fingerprint_text(fingerprint(linears)));
    list_outputs(linears);
    check_nothing_is_left_out();
    dtype_ = options.dtype ? *options.dtype : stored_dtype();
    dtype_name_ = format::torch_name(format_dtype_of(dtype_));
  }

  void write(const std::string& output) {
    format::make_folders("merge", output);
    write_shards(output);
    for (const format::SafetensorsFile& file : checkpoint_.files()) file.check_unchanged();
    adapter_.file.check_unchanged();
    write_files_beside_weights(checkpoint_.folder(), adapter_folder_, output, {dtype_name_, parts_tables_});
  }

 private:
  [[nodiscard]] at::ScalarType stored_dtype() const {
    const format::Dtype dtype = config_.dtype.value_or(checkpoint_.at(kEmbedding).tensor->dtype);
    return scalar_type_of(dtype, std::string(kEmbedding));
  }

  /// Of the codes as they are stored; a base whose codes are still to be made is another than the one that the adapter names.
  [[nodiscard]] uint64_t fingerprint(const std::vector<format::ModelParameter>& linears) const {
    FourBitFingerprint fingerprint;
    for (const format::ModelParameter& linear : linears) {
      if (format::is_quantized(checkpoint_, linear.name + ".weight"))
        fingerprint.add(read_quantized(linear.name + ".weight", linear.shape));
    }
    return fingerprint.value();
  }

  void list_outputs(const std::vector<format::ModelParameter>& linears) {
    const AdapterSet& set = skeleton_.adapters().active();
    const auto saved = [&](int64_t entry) {
      return format::TensorLocation{&adapter_.file, &adapter_.file.at(set.arena.entries()[static_cast<size_t>(entry)].name)};
    };
    parts_tables_ = config_.tie_word_embeddings && set.embed_tokens != set.lm_head;
    for (const format::ModelParameter& dense : format::dense_parameters(config_)) {
      Output output{dense.name, dense.shape, find_checked(checkpoint_, dense.name, dense.shape), nullptr};
      if (dense.name == kEmbedding && set.embed_tokens >= 0) output.copied = saved(set.embed_tokens);
      if (dense.name == kHead && set.lm_head >= 0) output.copied = saved(set.lm_head);
      outputs_.push_back(std::move(output));
    }
    if (parts_tables_) {
      const std::vector<int64_t> shape{config_.vocab_size, config_.hidden_size};
      const std::string name(kEmbedding);
      outputs_.push_back(
          {std::string(kHead), shape, set.lm_head >= 0 ? saved(set.lm_head) : find_checked(checkpoint_, name, shape), nullptr});
    } else if (config_.tie_word_embeddings && set.lm_head >= 0) {
      check_same_table(saved(set.embed_tokens), {&adapter_.file, &adapter_.file.at(message("{}{}", kPeftPrefix, kHead))});
    }
    for (size_t i = 0; i < linears.size(); ++i) {
      const std::string name = linears[i].name + ".weight";
      const auto& adapter = set.blocks[i / kProjectionCount][i % kProjectionCount];
      Output output{name, linears[i].shape, {}, adapter ? &*adapter : nullptr};
      const bool is_quantized = format::is_quantized(checkpoint_, name);
      if (!is_quantized) output.copied = find_checked(checkpoint_, name, linears[i].shape);
      if (adapter || is_quantized || will_be_quantized(linears[i].name)) output.copied = {};
      outputs_.push_back(std::move(output));
    }
    std::sort(outputs_.begin(), outputs_.end(), [](const Output& a, const Output& b) { return a.name < b.name; });
  }

  [[nodiscard]] bool will_be_quantized(const std::string& module) const {
    return quantizes_ && !names_module(options_.skip_modules, module);
  }

  /// A tensor that no layer takes may be the sign of another architecture.
  void check_nothing_is_left_out() const {
    for (const format::TensorLocation& location : checkpoint_.tensors()) {
      const std::string& name = location.tensor->name;
      const auto owner = std::find_if(outputs_.begin(), outputs_.end(), [&](const Output& output) {
        return name == output.name || (name.starts_with(output.name) && name[output.name.size()] == '.');
      });
      const bool known = owner != outputs_.end() || name == kHead || name.ends_with("rotary_emb.inv_freq");
      QLORAPP_CHECK_FORMAT(
          known,
          "[merge] {}: tensor '{}' does not belong to a {} model of {} layers, and would be lost. Is config.json of another model?",
          location.file->path(), name, config_.family->model_type, config_.num_hidden_layers);
    }
  }

  void check_same_table(const format::TensorLocation& a, const format::TensorLocation& b) const {
    bool same = a.tensor->dtype == b.tensor->dtype;
    at::Tensor left = buffer(*a.tensor), right = buffer(*b.tensor);
    for (int64_t offset = 0; same && offset < a.tensor->nbytes; offset += static_cast<int64_t>(left.nbytes())) {
      same = at::equal(piece(a, offset, left), piece(b, offset, right));
    }
    QLORAPP_CHECK_FORMAT(
        same,
        "[adapter] {}: '{}' and '{}' must be equal, because adapter_config.json ties them (ensure_weight_tying); they differ.",
        adapter_.file.path(), a.tensor->name, b.tensor->name);
  }

  [[nodiscard]] static at::Tensor buffer(const format::TensorEntry& entry) {
    const at::ScalarType type = scalar_type_of(entry.dtype, entry.name);
    return at::empty({kMergeBufferBytes / static_cast<int64_t>(c10::elementSize(type))}, at::TensorOptions().dtype(type));
  }

  /// What of the tensor fits the buffer.
  [[nodiscard]] static at::Tensor piece(const format::TensorLocation& from, int64_t offset, const at::Tensor& buffer) {
    const int64_t bytes = std::min(static_cast<int64_t>(buffer.nbytes()), from.tensor->nbytes - offset);
    from.file->read(*from.tensor, offset, {static_cast<std::byte*>(buffer.mutable_data_ptr()), static_cast<size_t>(bytes)});
    return buffer.narrow(0, 0, bytes / static_cast<int64_t>(buffer.element_size()));
  }

  void check_values(const at::Tensor& values, const std::string& name, const std::string& path) const {
    QLORAPP_CHECK_FORMAT(all_finite(values),
                         "[merge] {}: tensor '{}' must be finite in {}; it has inf or nan. Either the file is damaged, or its "
                         "values need a wider dtype.",
                         path, name, dtype_name_);
  }

  void copy(const Output& output, format::SafetensorsWriter& writer) const {
    const format::TensorEntry& entry = *output.copied.tensor;
    const at::Tensor stored = buffer(entry);
    for (int64_t offset = 0; offset < entry.nbytes; offset += static_cast<int64_t>(stored.nbytes())) {
      const at::Tensor values = piece(output.copied, offset, stored).to(dtype_);
      check_values(values, entry.name, output.copied.file->path());
      write_values(writer, values);
    }
  }

  [[nodiscard]] QuantizedTensor read_quantized(const std::string& name, const std::vector<int64_t>& shape) const {
    std::vector<StreamedTensor> parts;
    QuantizedTensor weight = stream_quantized(parts, checkpoint_, name, shape);
    stream_tensors(std::move(parts), at::kCPU);
    return weight;
  }

  [[nodiscard]] LoraAdapter read_adapter(const std::string& module, const LoraAdapter& shapes) const {
    const auto value = [&](const char* name) { return read_value(adapter_.file, message("{}{}{}", kPeftPrefix, module, name)); };
    LoraAdapter adapter;
    adapter.a = value(".lora_A.weight");
    adapter.b = value(".lora_B.weight");
    adapter.scaling = shapes.scaling;
    if (shapes.magnitude.defined()) adapter.magnitude = value(".lora_magnitude_vector");
    return adapter;
  }

  void merge(const Output& output, format::SafetensorsWriter& writer) const {
    const std::string module = output.name.substr(0, output.name.rfind('.'));
    std::optional<LoraAdapter> adapter;
    if (output.adapter != nullptr) adapter = read_adapter(module, *output.adapter);
    const bool is_quantized = format::is_quantized(checkpoint_, output.name);
    FrozenWeight weight = is_quantized ? FrozenWeight(read_quantized(output.name, output.shape))
                                       : FrozenWeight(read_tensor(find_checked(checkpoint_, output.name, output.shape)));
    at::Tensor merged;
    try {
      merged = merged_weight(std::move(weight), adapter ? &*adapter : nullptr, will_be_quantized(module) ? &quantizer_ : nullptr,
                             dtype_);
    } catch (const Error& error) {
      throw FormatError(message("[merge] tensor '{}' cannot be merged: {}", output.name, error.what()));
    }
    check_values(merged, output.name, checkpoint_.at(output.name).file->path());
    write_values(writer, merged);
  }

  /// In the order of names, each as full as it may be.
  [[nodiscard]] std::vector<std::vector<const Output*>> shards() const {
    std::vector<std::vector<const Output*>> shards(1);
    int64_t size = 0;
    for (const Output& output : outputs_) {
      const int64_t bytes = output.numel() * static_cast<int64_t>(c10::elementSize(dtype_));
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
    int64_t parameters = 0, done = 0;
    for (size_t i = 0; i < shards.size(); ++i) {
      std::array<char, 64> name{};
      std::snprintf(name.data(), name.size(), "model-%05zu-of-%05zu.safetensors", i + 1, shards.size());
      const std::string file = shards.size() == 1 ? "model.safetensors" : name.data();
      std::vector<format::TensorSpec> specs;
      std::map<std::string_view, const Output*> by_name;
      for (const Output* output : shards[i]) {
        specs.push_back({output->name, format_dtype_of(dtype_), output->shape});
        by_name[output->name] = output;
        weight_map[output->name] = file;
        parameters += output->numel();
      }
      format::SafetensorsWriter writer(format::path_in(folder, file), std::move(specs), {{"format", "pt"}});
      for (const format::TensorEntry& entry : writer.tensors()) {
        const Output& output = *by_name.at(entry.name);
        output.copied.tensor != nullptr ? copy(output, writer) : merge(output, writer);
        if (options_.progress) options_.progress(++done, std::ssize(outputs_));
      }
      writer.finish();
    }
    if (shards.size() == 1) return;
    format::Json index = format::Json::object();
    index["metadata"] = {{"total_parameters", parameters},
                         {"total_size", parameters * static_cast<int64_t>(c10::elementSize(dtype_))}};
    index["weight_map"] = std::move(weight_map);
    format::write_file_atomically(format::path_in(folder, "model.safetensors.index.json"),
                                  format::dump_python_json(index, format::kConfigStyle) + "\n");
  }

  format::Checkpoint checkpoint_;
  format::ModelConfig config_;
  std::string adapter_folder_;
  AdapterFile adapter_;
  CausalLM skeleton_;
  const MergeOptions& options_;
  Quantizer quantizer_;
  std::vector<Output> outputs_;
  at::ScalarType dtype_ = at::kFloat;
  std::string dtype_name_;
  bool quantizes_ = false;     ///< First, as training did.
  bool parts_tables_ = false;  ///< A tied head has become a tensor of its own.
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
  format::FreshFolder fresh(output);
  ops::mark_phase(ops::MemoryPhase::kMerge);
  Merger(model, adapter, options).write(fresh.path());
  fresh.keep();
}

}  // namespace qlorapp
