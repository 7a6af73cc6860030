// SPDX-License-Identifier: Apache-2.0
// CausalLM, its files and its batches.
#include <limits>

#include <nlohmann/json.hpp>

#include "adapters/adapter_set.hpp"
#include "bind.hpp"
#include "io/adapter_base.hpp"
#include "nn/decoder.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include "core/check.hpp"
#include "format/config_json.hpp"
#include "format/gguf_folders.hpp"
#include "io/linear_weight.hpp"
#include "lora_config_json.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/data/collate.hpp"
#include "qlorapp/dist/communicator.hpp"
#include "qlorapp/io/adapter.hpp"
#include "qlorapp/io/device.hpp"
#include "qlorapp/io/export.hpp"
#include "qlorapp/io/gguf.hpp"
#include "qlorapp/io/load_model.hpp"
#include "qlorapp/io/merge.hpp"
#include "qlorapp/io/save_model.hpp"
#include "qlorapp/nn/causal_lm.hpp"
#include "qlorapp/nn/generate.hpp"
#include "qlorapp/train/importance.hpp"
#include "qlorapp/train/verify_export.hpp"
#include "quantizer_options.hpp"

namespace qlorapp::python {
namespace {

using Progress = std::function<void(int64_t, int64_t)>;

std::shared_ptr<CausalLM> load(const std::string& folder, at::ScalarType compute_dtype, bool load_in_4bit,
                               const std::string& quant_type, int64_t block_size, bool double_quant, int64_t nested_block_size,
                               const std::string& compat, std::vector<std::string> skip_modules, at::Device device,
                               bool keep_blocks, bool base_on_host, const std::string& shard_over, bool of_node,
                               const std::optional<Progress>& progress) {
  LoadOptions options;
  options.keep_blocks = keep_blocks;
  options.compute_dtype = compute_dtype;
  options.load_in_4bit = load_in_4bit;
  options.quantization = quantizer_options(quant_type, block_size, double_quant, nested_block_size, compat);
  options.skip_modules = std::move(skip_modules);
  options.device = device;
  options.base_on_host = base_on_host;
  if (!shard_over.empty()) {
    options.shard_over = communicator_over(shard_over, device);
    if (of_node) options.shard_over = ranks_of_node(options.shard_over);
  }
  if (progress) options.progress = *progress;
  return reporting_failures(options.shard_over.get(), [&] { return std::make_shared<CausalLM>(load_model(folder, options)); });
}

void quantize(const std::string& folder, const std::string& output, at::ScalarType compute_dtype, const std::string& quant_type,
              int64_t block_size, bool double_quant, int64_t nested_block_size, const std::string& compat,
              const std::optional<Progress>& progress) {
  quantize_checkpoint(folder, output, quantizer_options(quant_type, block_size, double_quant, nested_block_size, compat),
                      compute_dtype, progress.value_or(Progress()));
}

void merge(const std::string& model, const std::string& adapter, const std::string& output, const std::optional<std::string>& base,
           const std::optional<at::ScalarType>& dtype, const std::string& quant_type, int64_t block_size, bool double_quant,
           int64_t nested_block_size, const std::string& compat, std::vector<std::string> skip_modules, int64_t max_shard_size,
           const std::optional<Progress>& progress) {
  MergeOptions options;
  if (base) options.base = parse_merge_base(*base);
  options.dtype = dtype;
  options.quantization = quantizer_options(quant_type, block_size, double_quant, nested_block_size, compat);
  options.skip_modules = std::move(skip_modules);
  options.max_shard_size = {max_shard_size};
  if (progress) options.progress = *progress;
  merge_adapter(model, adapter, output, options);
}

std::string write_export(const std::string& model, const std::string& adapter, const std::string& gguf,
                         const std::string& gguf_adapter, const std::string& ollama, const std::string& ollama_base,
                         const std::string& merged, const std::string& adapter_for, const std::string& output,
                         const std::string& type, const std::string& chat_template, const std::string& importance,
                         const std::optional<std::string>& base, const std::string& quant_type, int64_t block_size,
                         bool double_quant, int64_t nested_block_size, const std::string& compat,
                         std::vector<std::string> skip_modules, bool verify, const std::optional<Progress>& progress) {
  ExportOptions options{gguf, gguf_adapter, ollama, ollama_base, merged, adapter_for, output, type, chat_template, {}, {}};
  if (base) options.merge.base = parse_merge_base(*base);
  options.merge.quantization = quantizer_options(quant_type, block_size, double_quant, nested_block_size, compat);
  options.merge.skip_modules = std::move(skip_modules);
  if (progress) options.merge.progress = *progress;
  if (!importance.empty())
    options.importance = [&] { return measure_importance(model, adapter, importance, {.device = parse_device("auto")}); };
  const std::string written = export_model(model, adapter, options);
  if (!verify) return written;
  if (const auto found = verify_written(model, adapter, options, written, at::kCPU)) {
    for (const VerifiedForm& form : found->forms) {
      for (const std::string& cause : form.causes) log_warning(message("[export] {}: {}", form.path, cause));
    }
  }
  return written;
}

std::string compare_exports(const std::vector<std::string>& paths, const std::string& base, bool load_in_4bit, at::Device device,
                            std::vector<std::string> prompts, const std::string& data, int64_t max_new_tokens) {
  VerifyOptions options;
  options.base = base;
  options.load_in_4bit = load_in_4bit;
  options.device = device;
  options.prompts = std::move(prompts);
  if (!data.empty()) options.data = {data};
  options.max_new_tokens = max_new_tokens;
  return verify_export(paths, options).json();
}

void save(const CausalLM& model, const std::string& source, const std::string& output, const std::string& storage,
          const std::optional<std::vector<std::string>>& skip_modules, const std::optional<at::ScalarType>& compute_dtype) {
  save_model(model, source, output, {storage, skip_modules, compute_dtype});
}

UnpaddedBatch unpad_for(const CausalLM& model, const at::Tensor& input_ids, const std::optional<at::Tensor>& attention_mask,
                        const std::optional<at::Tensor>& labels, const std::optional<at::Tensor>& position_ids, bool on_host) {
  UnpaddedBatch unpadded = unpad(input_ids, attention_mask.value_or(at::Tensor()), labels.value_or(at::Tensor()),
                                 model.config().vocab_size, position_ids.value_or(at::Tensor()));
  const at::Device device = on_host ? at::Device(at::kCPU) : model.device();
  unpadded.batch = unpadded.batch.to(device);
  unpadded.indices = unpadded.indices.to(device);
  return unpadded;
}

/// [(tensor name, weight)] of everything frozen, in the order of the model. Of a weight that this process has a shard of: its shape on the
/// model's device, with one element of memory; that of a four-bit one is on meta.
py::list named_weights(const CausalLM& model) {
  py::list result;
  const auto whole = [&](const at::Tensor& weight, int64_t rows, int64_t columns) {
    if (!model.decoder().is_sharded() || (!weight.is_meta() && weight.size(0) == rows)) return weight;
    const auto options = weight.options().device(model.device());
    return at::full({1, 1}, std::numeric_limits<double>::quiet_NaN(), options).expand({rows, columns});
  };
  const auto table = [&](const at::Tensor& weight) { return whole(weight, model.config().vocab_size, model.config().hidden_size); };
  const auto add = [&](const std::string& name, const auto& weight) { result.append(py::make_tuple(name, weight)); };
  const Decoder& decoder = model.decoder();
  for (const format::Parameter& parameter : decoder.parameters()) {
    if (parameter.role == format::Role::kEmbedding || parameter.role == format::Role::kHead) {
      add(parameter.name(), table(decoder.own_dense(parameter)));
    } else if (parameter.role != format::Role::kLinear) {
      add(parameter.name(), decoder.own_dense(parameter));
    } else if (const FrozenWeight& weight = decoder.own_linear(parameter); weight.quantized.defined()) {
      add(parameter.name(), weight.quantized);
    } else {
      add(parameter.name(), whole(weight.dense, weight.dense.size(0), weight.dense.size(1)));
    }
  }
  if (model.config().tie_word_embeddings) add("lm_head.weight", table(decoder.own_lm_head()));  // a module, too
  return result;
}

std::vector<std::tuple<int64_t, int64_t, std::string>> segments(const CausalLM& model) {
  std::vector<std::tuple<int64_t, int64_t, std::string>> result;
  for (const Segment& segment : model.settings().segments()) {
    const bool as_told = segment.end - segment.begin == 1 || segment.keep == Keep::kInputOnHost;
    result.emplace_back(segment.begin, segment.end, to_string(as_told ? segment.keep : Keep::kInputOnly));
  }
  return result;
}

std::pair<at::Tensor, int64_t> as_pair(const LossSum& sum) { return {sum.loss, sum.targets}; }

}  // namespace

LoraConfig lora_config_from(const std::string& json) {
  LoraConfig config;
  format::from_json(format::parse_json(json, "LoraConfig"), config, "LoraConfig");
  return config;
}

void bind_model(py::module_& m) {
  py::class_<UnpaddedBatch>(m, "UnpaddedBatch", "A padded batch without its padding; include/qlorapp/data/collate.hpp.")
      .def_property_readonly("row_count", [](const UnpaddedBatch& self) { return self.batch.row_count(); })
      .def_property_readonly("target_count", [](const UnpaddedBatch& self) { return self.batch.target_count; })
      .def_property(
          "first_token", [](const UnpaddedBatch& self) { return self.batch.first_token; },
          [](UnpaddedBatch& self, int64_t token) { self.batch.first_token = token; }, "Of a batch that is a part of another.")
      .def_readonly("ignored_padding_labels", &UnpaddedBatch::ignored_padding_labels)
      .def_readonly("ignored_first_labels", &UnpaddedBatch::ignored_first_labels)
      .def("pad", &UnpaddedBatch::pad, py::arg("values"), py::arg("fill") = 0.0, NoGil());

  py::class_<CausalLM, std::shared_ptr<CausalLM>>(m, "CausalLM", "include/qlorapp/nn/causal_lm.hpp")
      .def("unpad", &unpad_for, py::arg("input_ids"), py::arg("attention_mask") = std::nullopt, py::arg("labels") = std::nullopt,
           py::arg("position_ids") = std::nullopt, py::arg("on_host") = false, NoGil())
      .def(
          "add_adapters",
          [](CausalLM& self, const std::string& json, uint64_t seed, const std::string& name,
             const std::optional<std::string>& weights) {
            self.add_adapters(lora_config_from(json), seed, name, weights ? checkpoint_weights(*weights) : WeightSource());
          },
          py::arg("lora_config_json"), py::arg("seed"), py::arg("name") = kDefaultAdapter, py::arg("weights") = std::nullopt,
          NoGil(), "`weights` names a folder with the weights as they were before quantization.")
      .def_property_readonly("has_adapters", [](const CausalLM& self) { return !self.adapters().empty(); })
      .def_property_readonly("base_was_changed", [](const CausalLM& self) { return self.adapters().changed_base().has_value(); })
      .def_property(
          "active_adapter", [](const CausalLM& self) { return self.adapters().active_name(); },
          [](CausalLM& self, const std::string& name) { self.adapters().activate(name); })
      .def(
          "delete_adapters", [](CausalLM& self, const std::string& name) { self.adapters().remove(name); }, py::arg("name"))
      .def(
          "enable_adapters", [](CausalLM& self, bool enabled) { self.adapters().enable(enabled); }, py::arg("enabled"))
      .def(
          "adapter_names",
          [](const CausalLM& self, const std::string& name) {
            std::vector<std::string> names;
            for (const auto& entry : self.adapters().at(name).arena.entries()) names.push_back(entry.name);
            return names;
          },
          py::arg("name") = "", "Names of an adapter's parameters, as PEFT stores them.")
      .def(
          "parameters", [](const CausalLM& self, const std::string& name) { return self.adapters().at(name).arena.parameters(); },
          py::arg("name") = "")
      .def(
          "adopt_parameter",
          [](CausalLM& self, int64_t i, const at::Tensor& parameter, const std::string& name) {
            self.adapters().adopt_parameter(i, parameter, name);
          },
          py::arg("i"), py::arg("parameter"), py::arg("name") = "")
      .def(
          "gradient", [](const CausalLM& self, int64_t i) { return self.arena().gradient(i); }, py::arg("i"))
      .def(
          "zero_grad", [](CausalLM& self) { self.arena().zero_grad(); }, NoGil())
      .def(
          "bind_gradients", [](CausalLM& self) { self.arena().bind_gradients(); }, NoGil())
      .def(
          "set_keep",
          [](CausalLM& self, const std::string& keep) {
            self.settings().set_segments(parse_segments(keep, std::ssize(self.blocks())));
          },
          py::arg("keep"))
      .def(
          "set_memory",
          [](CausalLM& self, int64_t loss_chunk_rows, int64_t mlp_tile_rows, const std::string& weight_workspace,
             bool embedding_on_host, bool base_on_host) {
            self.settings().set_memory(
                {loss_chunk_rows, mlp_tile_rows, parse_weight_workspace(weight_workspace), embedding_on_host, base_on_host});
          },
          py::kw_only(), py::arg("loss_chunk_rows") = 0, py::arg("mlp_tile_rows") = 0, py::arg("weight_workspace") = "layer",
          py::arg("embedding_on_host") = false, py::arg("base_on_host") = false, NoGil(), "include/qlorapp/nn/memory_settings.hpp")
      .def(
          "gathered_head", [](const CausalLM& self) { return self.decoder().lm_head(); }, NoGil(),
          "(vocabulary, hidden). Of a sharded base: an exchange.")
      .def_property_readonly("embedding_on_host", [](const CausalLM& self) { return self.decoder().embedding_on_host(); })
      .def(
          "leave_ranks",
          [](const CausalLM& self) {
            if (self.decoder().ranks()) self.decoder().ranks()->close();
          },
          NoGil(), "Before Python ends: threads of a process group must not outlive it. The model computes no more.")
      .def_property_readonly(
          "is_sharded", [](const CausalLM& self) { return self.decoder().is_sharded(); },
          "Each of several processes has a shard of the base: they make the same calls in the same order.")
      .def(
          "move_embedding",
          [](CausalLM& self, bool to_host) {
            MemorySettings settings = self.settings().memory();
            settings.embedding_on_host = to_host;
            self.settings().set_memory(settings);
          },
          py::arg("to_host"), NoGil(), "The table alone, between GPU and pinned host memory; the other settings of memory stay.")
      .def(
          "move_blocks",
          [](CausalLM& self, bool to_host) {
            MemorySettings settings = self.settings().memory();
            settings.base_on_host = to_host;
            self.settings().set_memory(settings);
            self.decoder().move_blocks(to_host);  // on a CPU, too, where the setting does nothing
          },
          py::arg("to_host"), NoGil(), "The blocks' frozen weights, between the device and host memory.")
      .def_property_readonly("segments", &segments, "[(begin, end, what is kept)]")
      .def(
          "forward_backward",
          [](CausalLM& self, const UnpaddedBatch& batch, const at::Tensor& grad_scale, uint64_t seed, uint32_t micro_step) {
            return as_pair(self.forward_backward(batch.batch, grad_scale, {.seed = seed, .micro_step = micro_step}));
          },
          py::arg("batch"), py::arg("grad_scale"), py::arg("seed") = 0, py::arg("micro_step") = 0, NoGil(),
          "(summed loss, number of targets); gradients are added to the parameters' .grad.")
      .def(
          "hidden_states",
          [](CausalLM& self, const UnpaddedBatch& batch, bool training, uint64_t seed, uint32_t micro_step) {
            return self.hidden_states(batch.batch, training, seed, micro_step);
          },
          py::arg("batch"), py::arg("training"), py::arg("seed") = 0, py::arg("micro_step") = 0, NoGil(),
          "(tokens, hidden) after the last norm, on the autograd graph.")
      .def(
          "loss_of",
          [](const CausalLM& self, const at::Tensor& hidden, const UnpaddedBatch& batch) {
            return self.loss_of(hidden, batch.batch);
          },
          py::arg("hidden"), py::arg("batch"), NoGil(), "The summed loss, on the graph of `hidden`.")
      .def("logits", &CausalLM::logits, py::arg("hidden"), NoGil())
      .def("weight_bytes", [](const CausalLM& self) { return self.decoder().weight_bytes().count; })
      .def(
          "linear_names",
          [](const CausalLM& self) {
            std::vector<std::string> names;
            for (format::Parameter& linear : self.decoder().linear_layers()) names.push_back(std::move(linear.module));
            return names;
          },
          "Paths of the linear layers in the module tree, in the order of the model.")
      .def("named_weights", &named_weights, "[(name in a checkpoint, tensor or QuantizedTensor)] of the frozen base.")
      .def_property_readonly(
          "body", [](const CausalLM& self) { return self.config().body().substr(0, self.config().body().size() - 1); },
          "Path of the decoder: \"model\", or \"model.language_model\" of a wrapper.")
      .def_property_readonly("tied", [](const CausalLM& self) { return self.config().tie_word_embeddings; })
      .def_property_readonly("vocab_size", [](const CausalLM& self) { return self.config().vocab_size; })
      .def_property_readonly("position_limit", [](const CausalLM& self) { return position_limit(self.config()); })
      .def_property_readonly("eos_token_ids", [](const CausalLM& self) { return self.config().eos_token_ids; })
      .def_property_readonly("lora_dropout",
                             [](const CausalLM& self) { return !self.adapters().empty() ? self.lora_config().lora_dropout : 0.0; })
      .def_property_readonly("device", &CausalLM::device)
      .def_property_readonly("dtype", &CausalLM::dtype)
      .def("save_adapter",
           py::overload_cast<const CausalLM&, const std::string&, const std::string&, const std::string&>(&save_adapter),
           py::arg("folder"), py::arg("base_model"), py::arg("name") = "", NoGil())
      .def("adapter_base_text", &adapter_base_text, py::arg("folder"), NoGil(),
           "What stands in qlorapp_base.json beside an adapter of this base in this folder; src/io/adapter_base.hpp.")
      .def("load_adapter", py::overload_cast<CausalLM&, const std::string&, const std::string&>(&load_adapter), py::arg("folder"),
           py::arg("name") = kDefaultAdapter, NoGil())
      .def("save", &save, py::arg("source"), py::arg("output"), py::kw_only(), py::arg("storage") = "uint8",
           py::arg("skip_modules") = std::nullopt, py::arg("compute_dtype") = std::nullopt, NoGil(),
           "Writes the frozen base as a Hugging Face folder; include/qlorapp/io/save_model.hpp.");

  m.def("verify_export", &compare_exports, py::arg("paths"), py::kw_only(), py::arg("base") = "", py::arg("load_in_4bit") = true,
        py::arg("device") = at::Device(at::kCPU), py::arg("prompts") = std::vector<std::string>{}, py::arg("data") = "",
        py::arg("max_new_tokens") = 32, NoGil(),
        "The receipt of a comparison, a JSON text; include/qlorapp/train/verify_export.hpp.");
  m.def("gguf_of", &format::gguf_of, py::arg("folder"), "src/format/gguf_folders.hpp.");
  m.def("is_gguf_file", &is_gguf_file, py::arg("path"), "include/qlorapp/io/gguf.hpp.");
  m.def("model_folder", &model_folder, py::arg("path"), "include/qlorapp/io/gguf.hpp.");
  m.def("model_path", &model_path, py::arg("folder"), "include/qlorapp/io/gguf.hpp.");
  m.def("load_model", &load, py::arg("folder"), py::kw_only(), py::arg("compute_dtype"), py::arg("load_in_4bit") = true,
        py::arg("quant_type") = "nf4", py::arg("block_size") = 64, py::arg("double_quant") = true,
        py::arg("nested_block_size") = 256, py::arg("compat") = "none", py::arg("skip_modules") = std::vector<std::string>{},
        py::arg("device") = at::Device(at::kCPU), py::arg("keep_blocks") = true, py::arg("base_on_host") = false,
        py::arg("shard_over") = "", py::arg("of_node") = false, py::arg("progress") = std::nullopt, NoGil(),
        "A Hugging Face folder as a CausalLM; include/qlorapp/io/load_model.hpp. shard_over: the name of a process group of "
        "torch.distributed; of_node: over its processes on this machine.");
  m.def("quantize_checkpoint", &quantize, py::arg("folder"), py::arg("output"), py::kw_only(),
        py::arg("compute_dtype") = at::kBFloat16, py::arg("quant_type") = "nf4", py::arg("block_size") = 64,
        py::arg("double_quant") = true, py::arg("nested_block_size") = 256, py::arg("compat") = "none",
        py::arg("progress") = std::nullopt, NoGil(),
        "Writes a folder that transformers loads as a bitsandbytes checkpoint; include/qlorapp/io/load_model.hpp.");
  m.def("merge", &merge, py::arg("model"), py::arg("adapter"), py::arg("output"), py::kw_only(), py::arg("base") = std::nullopt,
        py::arg("dtype") = std::nullopt, py::arg("quant_type") = "nf4", py::arg("block_size") = 64, py::arg("double_quant") = true,
        py::arg("nested_block_size") = 256, py::arg("compat") = "none", py::arg("skip_modules") = std::vector<std::string>{},
        py::arg("max_shard_size") = int64_t{5'000'000'000}, py::arg("progress") = std::nullopt, NoGil(),
        "Writes base and adapter as one dense Hugging Face folder; include/qlorapp/io/merge.hpp.");
  m.def("export_model", &write_export, py::arg("model"), py::arg("adapter"), py::kw_only(), py::arg("gguf") = "",
        py::arg("gguf_adapter") = "", py::arg("ollama") = "", py::arg("ollama_base") = "", py::arg("merged") = "",
        py::arg("adapter_for") = "", py::arg("output") = "", py::arg("type") = "", py::arg("chat_template") = "",
        py::arg("importance") = "", py::arg("base") = std::nullopt, py::arg("quant_type") = "nf4", py::arg("block_size") = 64,
        py::arg("double_quant") = true, py::arg("nested_block_size") = 256, py::arg("compat") = "none",
        py::arg("skip_modules") = std::vector<std::string>{}, py::arg("verify") = false, py::arg("progress") = std::nullopt,
        NoGil(), "Writes a model or adapter for other programs; include/qlorapp/io/export.hpp.");
}

}  // namespace qlorapp::python
