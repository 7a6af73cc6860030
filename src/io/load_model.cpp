// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/io/load_model.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "qlorapp/core/check.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/io/device.hpp"
#include "qlorapp/io/linear_weight.hpp"
#include "qlorapp/io/tensor_file.hpp"
#include "qlorapp/io/tensor_stream.hpp"
#include "qlorapp/nn/model_weights.hpp"

namespace qlorapp {
namespace {

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
    CausalLM::Weights weights = make_weights(
        config_,
        {[this](const std::string& name, const std::vector<int64_t>& shape) { return dense(name, shape); },
         [this](FrozenWeight& into, const std::string& module, int64_t out, int64_t in) { linear(into, module, out, in); }});
    stream_tensors(std::exchange(tensors_, {}), options_.device);
    return CausalLM(config_, std::move(weights));
  }

 private:
  /// In the compute dtype, on the device; filled later.
  at::Tensor dense(const std::string& name, const std::vector<int64_t>& shape) {
    const format::TensorLocation location = find_checked(checkpoint_, name, shape);
    const at::Tensor tensor = at::empty(shape, at::TensorOptions().dtype(options_.compute_dtype).device(options_.device));
    if (scalar_type_of(location.tensor->dtype, name) == options_.compute_dtype) {
      tensors_.push_back({location, tensor, {}, [this] { report(); }});
    } else {
      const auto convert = [flat = tensor.view({-1})](int64_t first, const at::Tensor& piece) {
        flat.narrow(0, first, piece.numel()).copy_(piece);
      };
      tensors_.push_back({location, {}, convert, [this] { report(); }});
    }
    return tensor;
  }

  void linear(FrozenWeight& weight, const std::string& module, int64_t out, int64_t in) {
    const std::string name = module + ".weight";
    if (format::is_quantized(checkpoint_, name)) {
      weight = FrozenWeight(stream_quantized(tensors_, checkpoint_, name, {out, in}, options_.device, [this] { report(); }));
    } else if (!options_.load_in_4bit || names_module(options_.skip_modules, module)) {
      weight = FrozenWeight(dense(name, {out, in}));
    } else {
      stream_and_quantize(tensors_, checkpoint_, name, {out, in}, quantizer_, [this, &weight](QuantizedTensor quantized) {
        weight = FrozenWeight(std::move(quantized));
        report();
      });
    }
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
  std::vector<StreamedTensor> tensors_;
  int64_t done_ = 0;
};

}  // namespace

CausalLM load_model(const std::string& folder, const LoadOptions& options) { return Loader(folder, options).load(); }

}  // namespace qlorapp
