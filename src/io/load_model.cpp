// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/io/load_model.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "qlorapp/core/check.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/io/device.hpp"
#include "qlorapp/io/linear_weight.hpp"
#include "qlorapp/io/tensor_file.hpp"

namespace qlorapp {
namespace {

/// The linear layers of a block in the order of Projection.
constexpr std::array<std::string_view, kProjectionCount> kProjectionNames{
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj",    "mlp.up_proj",      "mlp.down_proj"};

class Loader {
 public:
  Loader(const std::string& folder, const LoadOptions& options)
      : checkpoint_(folder), config_(format::load_model_config(folder)), options_(options), quantizer_(options.quantization) {
    const int64_t architecture = gpu_architecture(options.device);
    options_.compute_dtype = usable_dtype(options.compute_dtype, architecture);
    if (options_.compute_dtype != options.compute_dtype) {
      log_warning(concat("this GPU (sm_", architecture,
                         ") has no bfloat16 arithmetic: computing in float16, with loss scaling in training"));
    }
    check_only_known_tensors();
  }

  CausalLM load() {
    CausalLM::Weights weights;
    weights.embed_tokens = dense("model.embed_tokens.weight", {config_.vocab_size, config_.hidden_size});
    weights.lm_head =
        config_.tie_word_embeddings ? weights.embed_tokens : dense("lm_head.weight", {config_.vocab_size, config_.hidden_size});
    for (int64_t i = 0; i < config_.num_hidden_layers; ++i) weights.blocks.push_back(block(concat("model.layers.", i, ".")));
    weights.norm = dense("model.norm.weight", {config_.hidden_size});
    return CausalLM(config_, std::move(weights));
  }

 private:
  DecoderBlock::Weights block(const std::string& prefix) {
    DecoderBlock::Weights weights;
    weights.input_norm = dense(prefix + "input_layernorm.weight", {config_.hidden_size});
    weights.post_attention_norm = dense(prefix + "post_attention_layernorm.weight", {config_.hidden_size});
    const int64_t q = config_.num_attention_heads * config_.head_dim, kv = config_.num_key_value_heads * config_.head_dim;
    const std::array<std::pair<int64_t, int64_t>, kProjectionCount> shapes{{{q, config_.hidden_size},
                                                                            {kv, config_.hidden_size},
                                                                            {kv, config_.hidden_size},
                                                                            {config_.hidden_size, q},
                                                                            {config_.intermediate_size, config_.hidden_size},
                                                                            {config_.intermediate_size, config_.hidden_size},
                                                                            {config_.hidden_size, config_.intermediate_size}}};
    for (size_t i = 0; i < kProjectionCount; ++i) {
      weights.projections[i] = linear(prefix + std::string(kProjectionNames[i]), shapes[i].first, shapes[i].second);
    }
    return weights;
  }

  /// In the compute dtype, on the device.
  at::Tensor dense(const std::string& name, const std::vector<int64_t>& shape) {
    at::Tensor tensor = read_checked(checkpoint_, name, shape).to(options_.device, options_.compute_dtype);
    report();
    return tensor;
  }

  FrozenWeight linear(const std::string& module, int64_t out, int64_t in) {
    const std::string name = module + ".weight";
    if (format::is_quantized(checkpoint_, name)) {
      QuantizedTensor weight = read_quantized(checkpoint_, name, {out, in}).to(options_.device);
      report();
      return FrozenWeight(std::move(weight));
    }
    if (!options_.load_in_4bit || names_module(options_.skip_modules, module)) return FrozenWeight(dense(name, {out, in}));
    FrozenWeight weight(quantize_named(quantizer_, read_checked(checkpoint_, name, {out, in}).to(options_.device), name));
    report();
    return weight;
  }

  /// A tensor that no layer takes is said, not dropped in silence: it may be the sign of another architecture.
  void check_only_known_tensors() const {
    std::vector<std::string> unknown;
    for (const format::TensorLocation& location : checkpoint_.tensors()) {
      const std::string& name = location.tensor->name;
      const bool head = name == "lm_head.weight" || name.starts_with("lm_head.weight.");
      if (head || name.starts_with("model.embed_tokens.") || name == "model.norm.weight" || name.ends_with("rotary_emb.inv_freq"))
        continue;
      if (name.starts_with("model.layers.") && (name.find(".weight") != std::string::npos)) continue;
      unknown.push_back(name);
    }
    if (unknown.empty()) return;
    throw FormatError(concat("[load] ", checkpoint_.folder(), " holds ", unknown.size(), " tensor(s) that a ",
                             config_.family->model_type, " model does not have, '", unknown.front(),
                             "' for one. Biases and extra layers are not supported; is config.json of another model?"));
  }

  void report() {
    ++done_;
    if (options_.progress) options_.progress(done_, 2 + (config_.tie_word_embeddings ? 0 : 1) + config_.num_hidden_layers * 9);
  }

  format::Checkpoint checkpoint_;
  format::ModelConfig config_;
  LoadOptions options_;
  Quantizer quantizer_;
  int64_t done_ = 0;
};

}  // namespace

CausalLM load_model(const std::string& folder, const LoadOptions& options) { return Loader(folder, options).load(); }

}  // namespace qlorapp
