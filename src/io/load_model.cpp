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
#include "qlorapp/io/gguf.hpp"

namespace qlorapp {
namespace {

class Loader {
 public:
  Loader(const std::string& folder, const LoadOptions& options)
      : model_(format::open_model_folder(folder)), files_(model_.tensors), config_(model_.config), options_(options) {
    options_.device = at::empty({0}, options.device).device();  // "cuda" is one of them
    options_.compute_dtype = dtype_on(gpu_architecture(options.device), options.compute_dtype);
    if (!model_.other_parts.empty()) {
      log_info(message("[load] {} is a {}: its text is computed here ({} of the family {}). Not read here: {}.", folder,
                       config_.wrapper->architecture, config_.body().substr(0, config_.body().size() - 1),
                       config_.family->model_type, joined(model_.other_parts)));
    }
  }

  CausalLM load() {
    StoredWeights stored;
    stored.dtype = [&](const std::string& name, const std::vector<int64_t>& shape) {
      return scalar_type_of(find_checked(files_, name, shape).tensor->dtype, name);
    };
    stored.four_bit_form = [&](const std::string& name, const std::vector<int64_t>& shape) {
      const auto blocks = config_.blocks.find(name);
      if (options_.keep_blocks && blocks != config_.blocks.end())
        return std::optional(WeightForm::of_blocks(shape, blocks->second));
      return format::is_quantized(files_, name) ? std::optional(stored_form(files_, name, shape)) : std::nullopt;
    };
    stored.bring_quantized = [&](const std::string& name, const QuantizedTensor& places) {
      ++ordered_;
      if (has_code_book(places.quant_type)) return stream_quantized(tensors_, files_, name, places, [this] { report(); });
      const format::StoredBlocks& blocks = *files_.blocks_of(name);
      tensors_.push_back({{files_.at(name).file, &blocks.bytes}, places.packed, {}, [this] { report(); }});
    };
    stored.bring = [&](const std::string& name, const std::vector<int64_t>&, Arrival arrival) {
      ++ordered_;
      arrival.done = [this, done = std::move(arrival.done)] {
        if (done) done();
        report();
      };
      tensors_.push_back(streamed(files_.at(name), std::move(arrival)));
    };
    DecoderWeights weights = arrange_weights(config_, options_, stored);
    stream_tensors(std::exchange(tensors_, {}), options_.device);
    check_finite(weights);
    keep_own_shards(weights, config_);
    return CausalLM(config_, std::move(weights));
  }

 private:
  /// Four-bit weights were looked at when they were quantized or read.
  void check_finite(const DecoderWeights& weights) const {
    for (const format::Parameter& parameter : format::parameters(config_)) {
      const bool is_linear = parameter.role == format::Role::kLinear;
      const at::Tensor& dense = is_linear ? weights.linear(parameter).dense : weights.dense(parameter);
      if (is_linear && dense.defined() && dense.is_meta()) continue;  // another rank reads it
      qlorapp::check_finite(dense, files_.folder(), parameter.name());
    }
  }

  void report() {
    ++done_;
    if (options_.progress) options_.progress(done_, ordered_);
  }

  format::ModelFolder model_;
  const format::TensorFiles& files_;
  const format::ModelConfig& config_;
  LoadOptions options_;
  std::vector<StreamedTensor> tensors_;
  int64_t ordered_ = 0, done_ = 0;
};

}  // namespace

CausalLM load_model(const std::string& folder, const LoadOptions& options) { return Loader(model_folder(folder), options).load(); }

}  // namespace qlorapp
