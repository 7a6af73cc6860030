// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/io/load_model.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "core/check.hpp"
#include "format/model_folder.hpp"
#include "io/finite.hpp"
#include "io/linear_weight.hpp"
#include "io/tensor_file.hpp"
#include "io/tensor_stream.hpp"
#include "nn/arriving_weights.hpp"
#include "nn/decoder.hpp"
#include "qlorapp/core/log.hpp"
#include "qlorapp/io/device.hpp"

namespace qlorapp {
namespace {

class Loader {
 public:
  Loader(const std::string& folder, const LoadOptions& options)
      : model_(format::open_model_folder(folder)), checkpoint_(model_.checkpoint), config_(model_.config), options_(options) {
    options_.compute_dtype = dtype_on(gpu_architecture(options.device), options.compute_dtype);
  }

  CausalLM load() {
    StoredWeights stored;
    stored.dtype = [&](const std::string& name, const std::vector<int64_t>& shape) {
      return scalar_type_of(find_checked(checkpoint_, name, shape).tensor->dtype, name);
    };
    stored.four_bit_form = [&](const std::string& name, const std::vector<int64_t>& shape) {
      return format::is_quantized(checkpoint_, name) ? std::optional(stored_form(checkpoint_, name, shape)) : std::nullopt;
    };
    stored.bring_quantized = [&](const std::string& name, const QuantizedTensor& places) {
      ++ordered_;
      stream_quantized(tensors_, checkpoint_, name, places, [this] { report(); });
    };
    stored.bring = [&](const std::string& name, const std::vector<int64_t>&, Arrival arrival) {
      ++ordered_;
      arrival.done = [this, done = std::move(arrival.done)] {
        if (done) done();
        report();
      };
      tensors_.push_back(streamed(checkpoint_.at(name), std::move(arrival)));
    };
    DecoderWeights weights = arrange_weights(config_, options_, stored);
    stream_tensors(std::exchange(tensors_, {}), options_.device);
    check_finite(weights);
    keep_own_parts(weights, config_);
    return CausalLM(config_, std::move(weights));
  }

 private:
  /// Four-bit weights were looked at when they were quantized or read.
  void check_finite(const DecoderWeights& weights) const {
    const auto check = [&](const at::Tensor& tensor, const std::string& name) {
      qlorapp::check_finite(tensor, checkpoint_.folder(), name);
    };
    check(weights.embed_tokens, "model.embed_tokens.weight");
    if (!weights.lm_head.is_alias_of(weights.embed_tokens)) check(weights.lm_head, "lm_head.weight");
    check(weights.norm, "model.norm.weight");
    const std::vector<format::ModelParameter> linears = format::linear_layers(config_);
    for (size_t block = 0; block < weights.blocks.size(); ++block) {
      const std::string prefix = message("model.layers.{}.", block);
      check(weights.blocks[block].input_norm, prefix + "input_layernorm.weight");
      check(weights.blocks[block].post_attention_norm, prefix + "post_attention_layernorm.weight");
      for (size_t i = 0; i < kProjectionCount; ++i) {
        const at::Tensor& dense = weights.blocks[block].projections[i].dense;
        if (dense.defined() && dense.is_meta()) continue;  // another rank reads it
        check(dense, linears[block * kProjectionCount + i].name + ".weight");
      }
    }
  }

  void report() {
    ++done_;
    if (options_.progress) options_.progress(done_, ordered_);
  }

  format::ModelFolder model_;
  const format::Checkpoint& checkpoint_;
  const format::ModelConfig& config_;
  LoadOptions options_;
  std::vector<StreamedTensor> tensors_;
  int64_t ordered_ = 0, done_ = 0;
};

}  // namespace

CausalLM load_model(const std::string& folder, const LoadOptions& options) { return Loader(folder, options).load(); }

}  // namespace qlorapp
