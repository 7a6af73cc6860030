// SPDX-License-Identifier: Apache-2.0
#include "nn/arriving_weights.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "core/check.hpp"
#include "nn/block_weights.hpp"
#include "nn/decoder.hpp"
#include "nn/model_weights.hpp"
#include "ops/device_memory.hpp"
#include "ops/memory_tape.hpp"
#include "qlorapp/dist/communicator.hpp"

namespace qlorapp {
namespace {

/// Blocks and tables are dealt out, so that each rank reads its share of the files.
int64_t reader_of(int64_t number, const Communicator& ranks) { return number % ranks.size(); }
/// Makes the places of weights, and orders what is to come there.
class Arrangement {
 public:
  Arrangement(const format::ModelConfig& config, const WeightOptions& options, const StoredWeights& stored)
      : config_(config),
        options_(options),
        ranks_(options.shard_over && options.shard_over->size() > 1 ? options.shard_over : nullptr),
        stored_(stored),
        quantizer_(options.quantization) {}

  /// That hold the shards, or null.
  [[nodiscard]] const std::shared_ptr<Communicator>& ranks() const { return ranks_; }

  [[nodiscard]] at::Tensor dense(const std::string& name, const std::vector<int64_t>& shape) const {
    const bool embeds = name == embedding_, heads = name == "lm_head.weight";
    // A tied table is the head, too: it is whole on each rank, and where the model computes.
    const bool is_table = !config_.tie_word_embeddings && (embeds || heads);
    const bool to_host = options_.embedding_on_host && is_table && embeds && ops::computes_on_gpu(options_.device);
    const at::TensorOptions options = at::TensorOptions().dtype(options_.compute_dtype).device(options_.device);
    at::Tensor place;
    if (to_host) {
      place = ops::empty_on_host(shape, options_.compute_dtype, options_.device);
    } else if (ranks_ && is_table) {
      if (reader_of(heads ? 1 : 0, *ranks_) != ranks_->rank()) return at::empty({0, shape[1]}, options);
      place = at::empty({ranks_->size() * shard_rows(shape[0], ranks_->size()), shape[1]}, options).narrow(0, 0, shape[0]);
    } else {
      place = ops::empty_for_weight(shape, options);
    }
    bring_dense(name, place);
    return place;
  }

  /// Into the places of `weight` if it has any; else it is empty until it comes, if it is quantized on its way.
  void linear(FrozenWeight& weight, const std::string& module, const std::vector<int64_t>& shape) const {
    const std::string name = module + ".weight";
    const bool has_places = weight.dense.defined() || weight.quantized.defined();
    if (is_quantized_here(module, shape)) {
      bring_quantizing(name, shape, [&weight, has_places](QuantizedTensor quantized) {
        FrozenWeight come(std::move(quantized));
        has_places ? copy_weight(weight, come) : static_cast<void>(weight = std::move(come));
      });
      return;
    }
    if (!has_places) weight = empty_weight(form_of(module, shape), places_on(options_.device));
    weight.quantized.defined() ? stored_.bring_quantized(name, weight.quantized) : bring_dense(name, weight.dense);
  }

  /// One piece of host memory for a block's linear layers, or of the rank that reads them, until each keeps its shard.
  void make_piece(DecoderBlock::Weights& block, int64_t number, const BlockForms& forms) const {
    const ops::MemoryUseScope use(ops::MemoryUse::kCodes);
    if (!ranks_) {
      block.piece = ops::empty_on_host({bytes_in_one_piece(forms)}, at::kByte, options_.device);
    } else if (reader_of(number, *ranks_) == ranks_->rank()) {
      const at::TensorOptions options = at::TensorOptions().dtype(at::kByte).device(options_.device);
      block.piece = at::empty({ranks_->size() * shard_bytes(forms, ranks_->size())}, options);
    }
    block.projections = block.piece.defined() ? views_of(block.piece, forms) : shapes_of(forms, options_.device);
  }

  [[nodiscard]] WeightForm form_of(const std::string& module, const std::vector<int64_t>& shape) const {
    const std::string name = module + ".weight";
    if (is_quantized_here(module, shape)) return {shape, stored_.dtype(name, shape), options_.quantization};
    return stored_.four_bit_form(name, shape).value_or(WeightForm{shape, options_.compute_dtype});
  }

 private:
  [[nodiscard]] bool is_quantized_here(const std::string& module, const std::vector<int64_t>& shape) const {
    return options_.load_in_4bit && !config_.quantization.has_value() && !names_module(options_.skip_modules, module) &&
           !stored_.four_bit_form(module + ".weight", shape);
  }

  void bring_dense(const std::string& name, const at::Tensor& place) const {
    const std::vector<int64_t> shape = place.sizes().vec();
    stored_.bring(name, shape, arrive_dense(place, stored_.dtype(name, shape), options_.device));
  }

  void bring_quantizing(const std::string& name, const std::vector<int64_t>& shape,
                        std::function<void(QuantizedTensor)> done) const {
    stored_.bring(name, shape, arrive_quantized(name, shape, stored_.dtype(name, shape), quantizer_, std::move(done)));
  }

  const format::ModelConfig& config_;
  std::string embedding_ = format::embedding_module(config_) + ".weight";
  const WeightOptions& options_;
  std::shared_ptr<Communicator> ranks_;
  const StoredWeights& stored_;
  Quantizer quantizer_;
};

}  // namespace

DecoderWeights arrange_weights(const format::ModelConfig& config, const WeightOptions& options, const StoredWeights& stored) {
  const Arrangement arrangement(config, options, stored);
  const Residency residency = residency_of("[load] ", options.base_on_host, sharding_over(arrangement.ranks().get()));
  const bool in_pieces =
      residency == Residency::kSharded || (residency == Residency::kHost && ops::computes_on_gpu(options.device));
  DecoderWeights weights = make_weights(
      config, {[&](const std::string& name, const std::vector<int64_t>& shape) { return arrangement.dense(name, shape); },
               [&](FrozenWeight& weight, const std::string& module, int64_t out, int64_t in) {
                 if (!in_pieces) arrangement.linear(weight, module, {out, in});
               }});
  if (in_pieces) {
    const std::vector<format::Parameter> linears = format::parameters(config, format::Role::kLinear);
    std::vector<BlockForms> forms(weights.blocks.size());
    for (const format::Parameter& linear : linears)
      forms[static_cast<size_t>(linear.layer)].push_back(arrangement.form_of(linear.module, linear.shape));
    for (size_t i = 0; i < forms.size(); ++i) arrangement.make_piece(weights.blocks[i], static_cast<int64_t>(i), forms[i]);
    for (const format::Parameter& linear : linears) {
      DecoderBlock::Weights& block = weights.blocks[static_cast<size_t>(linear.layer)];
      if (block.piece.defined()) arrangement.linear(block.projections[linear.slot], linear.module, linear.shape);
    }
  }
  weights.ranks = arrangement.ranks();
  return weights;
}

void keep_own_shards(DecoderWeights& weights, const format::ModelConfig& config) {
  if (!weights.ranks) return;
  const at::NoGradGuard no_grad;
  const ops::MemoryUseScope use(ops::MemoryUse::kCodes);
  Communicator& ranks = *weights.ranks;
  const at::Device device = weights.norm.device();
  ranks.barrier();  // of the hosts: a rank that could not read its share is named here, and no GPU waits for it
  for (at::Tensor* table : {&weights.embed_tokens, &weights.lm_head}) {
    if (config.tie_word_embeddings || table->device() != device) continue;
    const int64_t width = config.hidden_size, rows = ranks.size() * shard_rows(config.vocab_size, ranks.size());
    const bool is_read_here = table->size(0) > 0;
    const ops::MemoryUseScope dense(ops::MemoryUse::kDense);
    const at::Tensor all = is_read_here ? table->as_strided({rows, width}, {width, 1}) : at::empty({rows, width}, table->options());
    table->reset();
    ranks.broadcast(all, reader_of(table == &weights.lm_head ? 1 : 0, ranks)).wait();
    *table = shard_of(all, ranks);
  }
  for (size_t i = 0; i < weights.blocks.size(); ++i) {
    DecoderBlock::Weights& block = weights.blocks[i];
    const BlockForms forms = forms_of(block.projections);
    const at::TensorOptions options = at::TensorOptions().dtype(at::kByte).device(device);
    const at::Tensor piece = block.piece.defined() ? std::exchange(block.piece, {})
                                                   : at::empty({ranks.size() * shard_bytes(forms, ranks.size())}, options);
    block.projections = shapes_of(forms, device);
    ranks.broadcast(piece, reader_of(static_cast<int64_t>(i), ranks)).wait();
    block.piece = shard_of(piece, ranks);
  }
}

bool names_module(const std::vector<std::string>& names, const std::string& module) {
  return std::any_of(names.begin(), names.end(),
                     [&](const std::string& name) { return module == name || module.ends_with("." + name); });
}

}  // namespace qlorapp
