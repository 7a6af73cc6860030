// SPDX-License-Identifier: Apache-2.0
/// Models of real shapes with random weights on the GPU, made in four bits directly: no dense weight is ever there.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/zeros.h>

#include "nn/block_weights.hpp"
#include "nn/decoder.hpp"
#include "nn/model_weights.hpp"
#include "qlorapp/format/model_config.hpp"
#include "qlorapp/nn/causal_lm.hpp"

namespace qlorapp::bench {

/// Random codes and scales: (out, in) in NF4 with double quantization.
inline FrozenWeight random_codes(int64_t out, int64_t in) {
  const auto bytes = at::TensorOptions().dtype(at::kByte).device(at::kCUDA);
  const int64_t blocks = out * in / 64;
  QuantizedTensor weight;
  weight.shape = {out, in};
  weight.dtype = at::kBFloat16;
  weight.packed = at::randint(0, 256, {out * in / 2, 1}, bytes);
  weight.absmax = at::randint(0, 256, {blocks}, bytes);
  weight.nested_absmax = at::full({(blocks + 255) / 256}, 0.01, bytes.dtype(at::kFloat));
  weight.nested_offset = at::full({}, 0.03, bytes.dtype(at::kFloat));
  return FrozenWeight(std::move(weight));
}

inline DecoderWeights random_weights(const format::ModelConfig& config, at::ScalarType dtype) {
  const auto options = at::TensorOptions().dtype(dtype).device(at::kCUDA);
  return make_weights(config,
                      {[&](const std::string&, const std::vector<int64_t>& shape) {
                         return shape.size() == 1 ? at::ones(shape, options) : at::empty(shape, options).normal_(0, 0.02);
                       },
                       [](FrozenWeight& into, const std::string&, int64_t out, int64_t in) { into = random_codes(out, in); }});
}

/// Leaves each rank its shard of every block and table (WeightOptions::shard_over). @pre all ranks have the same weights.
inline void shard(DecoderWeights& weights, const std::shared_ptr<Communicator>& ranks) {
  for (DecoderBlock::Weights& block : weights.blocks) {
    const BlockForms forms = forms_of(block.projections);
    const int64_t bytes = ranks->size() * shard_bytes(forms, ranks->size());
    const at::Tensor piece = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(at::kCUDA));
    const BlockWeights whole = views_of(piece, forms);
    for (size_t i = 0; i < whole.size(); ++i) copy_weight(whole[i], block.projections[i]);
    block.piece = shard_of(piece, *ranks);
    block.projections = shapes_of(forms, at::kCUDA);
  }
  for (at::Tensor* table : {&weights.embed_tokens, &weights.lm_head}) {
    if (weights.lm_head.is_alias_of(weights.embed_tokens)) break;
    *table = shard_of(*table, *ranks);
  }
  weights.ranks = ranks;
}

}  // namespace qlorapp::bench
