// SPDX-License-Identifier: Apache-2.0
#include "nn/arriving_weights.hpp"

#include <ATen/ATen.h>

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
int64_t table_number(const std::string& name) { return name == "lm_head.weight" ? 1 : 0; }

/// A tied table is the head, too: it is whole on each rank.
bool is_divided(const format::ModelConfig& config, const std::string& name) {
  return !config.tie_word_embeddings && (name == "lm_head.weight" || name == "model.embed_tokens.weight");
}

/// Makes the places of weights, and orders what is to come there.
class Arrangement {
 public:
  Arrangement(const format::ModelConfig& config, const WeightOptions& options, const StoredWeights& stored)
      : config_(config),
        options_(options),
        ranks_(options.divide_over && options.divide_over->size() > 1 ? options.divide_over : nullptr),
        stored_(stored),
        quantizer_(options.quantization) {}

  /// That the blocks are divided over, or null.
  [[nodiscard]] const std::shared_ptr<Communicator>& ranks() const { return ranks_; }

  [[nodiscard]] at::Tensor dense(const std::string& name, const std::vector<int64_t>& shape) const {
    const bool to_host = options_.embedding_on_host && !config_.tie_word_embeddings && name == "model.embed_tokens.weight" &&
                         ops::computes_on_gpu(options_.device);
    const at::TensorOptions options = at::TensorOptions().dtype(options_.compute_dtype).device(options_.device);
    at::Tensor place;
    if (to_host) {
      place = ops::empty_on_host(shape, options_.compute_dtype, options_.device);
    } else if (ranks_ && is_divided(config_, name)) {
      if (reader_of(table_number(name), *ranks_) != ranks_->rank()) return at::empty({0, shape[1]}, options);
      place = at::empty({ranks_->size() * rows_of_part(shape[0], ranks_->size()), shape[1]}, options).narrow(0, 0, shape[0]);
    } else {
      place = at::empty(shape, options);
    }
    bring_dense(name, place);
    return place;
  }

  /// `weight` is empty until it comes, if it is quantized on its way.
  void linear(FrozenWeight& weight, const std::string& module, const std::vector<int64_t>& shape) const {
    const std::string name = module + ".weight";
    if (is_quantized_here(module, shape)) {
      bring_quantizing(name, shape, [&weight](QuantizedTensor quantized) { weight = FrozenWeight(std::move(quantized)); });
      return;
    }
    weight = empty_weight(form_of(module, shape), [&](at::IntArrayRef sizes, at::ScalarType dtype) {
      return at::empty(sizes, at::TensorOptions().dtype(dtype).device(options_.device));
    });
    weight.quantized.defined() ? stored_.bring_quantized(name, weight.quantized) : bring_dense(name, weight.dense);
  }

  using Linears = std::vector<format::Parameter>;

  /// All linear layers of a block, into one piece of host memory.
  void block_on_host(DecoderBlock::Weights& block, const Linears& linears) const {
    const BlockForms forms = forms_of(linears);
    block.on_host = ops::empty_on_host({bytes_in_one_piece(forms)}, at::kByte, options_.device);
    bring_piece(block, block.on_host, linears);
  }

  /// A block that ranks will hold parts of: one of them reads it, and has all of it for the while.
  void divided_block(DecoderBlock::Weights& block, bool is_read_here, const Linears& linears) const {
    const BlockForms forms = forms_of(linears);
    block.projections = shapes_of(forms, options_.device);
    if (!is_read_here) return;
    const ops::MemoryUseScope use(ops::MemoryUse::kCodes);
    const int64_t ranks = ranks_->size();
    block.part = at::empty({ranks * bytes_of_part(forms, ranks)}, at::TensorOptions().dtype(at::kByte).device(options_.device));
    bring_piece(block, block.part, linears);
  }

 private:
  [[nodiscard]] BlockForms forms_of(const Linears& linears) const {
    BlockForms forms;
    for (const format::Parameter& linear : linears) forms.push_back(form_of(linear.module, linear.shape));
    return forms;
  }

  void bring_piece(DecoderBlock::Weights& block, const at::Tensor& piece, const Linears& linears) const {
    block.projections = views_of(piece, forms_of(linears));
    for (const format::Parameter& linear : linears) {
      const std::string name = linear.name();
      const FrozenWeight& places = block.projections[linear.slot];
      if (is_quantized_here(linear.module, linear.shape)) {
        bring_quantizing(name, linear.shape,
                         [places](QuantizedTensor quantized) { copy_weight(places, FrozenWeight(std::move(quantized))); });
      } else if (places.quantized.defined()) {
        stored_.bring_quantized(name, places.quantized);
      } else {
        bring_dense(name, places.dense);
      }
    }
  }

  [[nodiscard]] bool is_quantized_here(const std::string& module, const std::vector<int64_t>& shape) const {
    return options_.load_in_4bit && !config_.quantization.has_value() && !names_module(options_.skip_modules, module) &&
           !stored_.four_bit_form(module + ".weight", shape);
  }

  [[nodiscard]] WeightForm form_of(const std::string& module, const std::vector<int64_t>& shape) const {
    const std::string name = module + ".weight";
    if (is_quantized_here(module, shape)) return {shape, stored_.dtype(name, shape), options_.quantization};
    return stored_.four_bit_form(name, shape).value_or(WeightForm{shape, options_.compute_dtype});
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
  const WeightOptions& options_;
  std::shared_ptr<Communicator> ranks_;
  const StoredWeights& stored_;
  Quantizer quantizer_;
};

}  // namespace

DecoderWeights arrange_weights(const format::ModelConfig& config, const WeightOptions& options, const StoredWeights& stored) {
  const Arrangement arrangement(config, options, stored);
  const bool to_host = options.base_on_host && ops::computes_on_gpu(options.device);
  const std::shared_ptr<Communicator>& ranks = arrangement.ranks();
  QLORAPP_CHECK_VALUE(!(ranks && options.base_on_host),
                      "[load] base_on_host must be without base_sharding; got both. Leave one of them out.");
  const bool in_pieces = to_host || ranks;
  DecoderWeights weights = make_weights(
      config, {[&](const std::string& name, const std::vector<int64_t>& shape) { return arrangement.dense(name, shape); },
               [&](FrozenWeight& weight, const std::string& module, int64_t out, int64_t in) {
                 if (!in_pieces) arrangement.linear(weight, module, {out, in});
               }});
  std::vector<Arrangement::Linears> blocks(in_pieces ? weights.blocks.size() : 0);
  if (in_pieces) {
    for (format::Parameter& linear : format::parameters(config, format::Role::kLinear))
      blocks[static_cast<size_t>(linear.layer)].push_back(std::move(linear));
  }
  for (size_t block = 0; block < blocks.size(); ++block) {
    const bool is_read_here = ranks && reader_of(static_cast<int64_t>(block), *ranks) == ranks->rank();
    if (ranks) arrangement.divided_block(weights.blocks[block], is_read_here, blocks[block]);
    else arrangement.block_on_host(weights.blocks[block], blocks[block]);
  }
  weights.ranks = ranks;
  return weights;
}

void keep_own_parts(DecoderWeights& weights, const format::ModelConfig& config) {
  if (!weights.ranks) return;
  const at::NoGradGuard no_grad;
  const ops::MemoryUseScope use(ops::MemoryUse::kCodes);
  Communicator& ranks = *weights.ranks;
  const at::Device device = weights.norm.device();
  ranks.barrier();  // of the hosts: a rank that could not read its share is named here, and no GPU waits for it
  for (at::Tensor* table : {&weights.embed_tokens, &weights.lm_head}) {
    if (config.tie_word_embeddings || table->device() != device) continue;
    const int64_t width = config.hidden_size, rows = rows_of_part(config.vocab_size, ranks.size());
    const bool is_read_here = table->size(0) > 0;
    const ops::MemoryUseScope dense(ops::MemoryUse::kDense);
    const at::Tensor all = is_read_here ? table->as_strided({ranks.size() * rows, width}, {width, 1})
                                        : at::empty({ranks.size() * rows, width}, table->options());
    table->reset();
    ranks.broadcast(all, reader_of(table == &weights.lm_head ? 1 : 0, ranks)).wait();
    *table = at::empty({rows, width}, all.options()).copy_(all.narrow(0, ranks.rank() * rows, rows));
  }
  for (size_t i = 0; i < weights.blocks.size(); ++i) {
    DecoderBlock::Weights& block = weights.blocks[i];
    const BlockForms forms = forms_of(block.projections);
    const int64_t bytes = bytes_of_part(forms, ranks.size());
    const at::TensorOptions options = at::TensorOptions().dtype(at::kByte).device(device);
    const at::Tensor piece = block.part.defined() ? std::exchange(block.part, {}) : at::empty({ranks.size() * bytes}, options);
    block.projections = shapes_of(forms, device);
    ranks.broadcast(piece, reader_of(static_cast<int64_t>(i), ranks)).wait();
    block.part = at::empty({bytes}, options).copy_(piece.narrow(0, ranks.rank() * bytes, bytes));
  }
}

bool names_module(const std::vector<std::string>& names, const std::string& module) {
  return std::any_of(names.begin(), names.end(),
                     [&](const std::string& name) { return module == name || module.ends_with("." + name); });
}

}  // namespace qlorapp
