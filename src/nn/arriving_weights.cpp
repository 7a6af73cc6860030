// SPDX-License-Identifier: Apache-2.0
#include "nn/arriving_weights.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "nn/decoder.hpp"
#include "nn/model_weights.hpp"
#include "ops/embedding.hpp"
#include "ops/memory_tape.hpp"

namespace qlorapp {

DecoderWeights arrange_weights(const format::ModelConfig& config, const WeightOptions& options, const StoredWeights& checkpoint) {
  const Quantizer quantizer(options.quantization);
  const auto dense = [&](const std::string& name, const std::vector<int64_t>& shape) {
    const at::ScalarType stored = checkpoint.dtype(name, shape);
    at::Tensor place;
    if (options.embedding_on_host && !config.tie_word_embeddings && name == "model.embed_tokens.weight" &&
        ops::computes_on_gpu(options.device)) {
      place = ops::empty_host_table(shape, options.compute_dtype, options.device);
    } else {
      place = at::empty(shape, at::TensorOptions().dtype(options.compute_dtype).device(options.device));
    }
    checkpoint.bring(name, shape, arrive_dense(place, stored, options.device));
    return place;
  };
  const auto linear = [&](FrozenWeight& weight, const std::string& module, int64_t out, int64_t in) {
    const std::string name = module + ".weight";
    const std::vector<int64_t> shape{out, in};
    if (checkpoint.is_quantized(name)) {
      weight = FrozenWeight(checkpoint.bring_quantized(name, shape));
    } else if (!options.load_in_4bit || config.quantization.has_value() || names_module(options.skip_modules, module)) {
      weight = FrozenWeight(dense(name, shape));
    } else {
      checkpoint.bring(name, shape,
                       arrive_quantized(name, shape, checkpoint.dtype(name, shape), quantizer,
                                        [&weight](QuantizedTensor quantized) { weight = FrozenWeight(std::move(quantized)); }));
    }
  };
  return make_weights(config, {dense, linear});
}

bool names_module(const std::vector<std::string>& names, const std::string& module) {
  return std::any_of(names.begin(), names.end(),
                     [&](const std::string& name) { return module == name || module.ends_with("." + name); });
}

}  // namespace qlorapp
