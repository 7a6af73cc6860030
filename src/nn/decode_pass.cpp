// SPDX-License-Identifier: Apache-2.0
#include "nn/decode_pass.hpp"

#include <optional>
#include <span>
#include <utility>

#include <ATen/ATen.h>

#include "nn/block/block_data.hpp"
#include "nn/decode_adapters.hpp"
#include "nn/decoder.hpp"
#include "nn/generation_cache.hpp"
#include "qlorapp/nn/causal_lm.hpp"

namespace qlorapp {
namespace {

using format::Group;
using format::Site;

bool is_like(const QuantizedTensor& weight, const QuantizedTensor& first) {
  return weight.defined() && weight.quant_type == first.quant_type && weight.block_size == first.block_size &&
         weight.nested_block_size == first.nested_block_size && weight.double_quantized() == first.double_quantized();
}

/// A layer that holds gate and up becomes two, which read the same u.
/// @returns false where a nested block would be cut.
bool halve(ops::PassGroup& group, const QuantizedTensor& kind) {
  const ops::PassLinear whole = group.linears.front();
  const int64_t elements = whole.rows / 2 * group.columns, blocks = elements / kind.block_size;
  if (whole.rows % 2 != 0 || elements % (2 * kind.block_size) != 0) return false;
  if (whole.nested_absmax.defined() && blocks % kind.nested_block_size != 0) return false;
  group.linears.clear();
  for (const int64_t half : {0, 1}) {
    const auto part = [&](const at::Tensor& of_all, int64_t count) { return of_all.flatten().narrow(0, half * count, count); };
    ops::PassLinear own = whole;
    own.rows = whole.rows / 2;
    own.packed = part(whole.packed, elements / 2);
    own.absmax = part(whole.absmax, blocks);
    if (own.nested_absmax.defined()) own.nested_absmax = part(whole.nested_absmax, blocks / kind.nested_block_size);
    if (own.b.defined()) own.b = own.b.narrow(0, half * own.rows, own.rows);
    group.linears.push_back(std::move(own));
  }
  return true;
}

/// @param first  the kind that all weights must have.
std::optional<ops::PassGroup> group_of(const BlockData& block, Group group, const DecodeAdapters* adapters,
                                       const QuantizedTensor& first) {
  ops::PassGroup found;
  std::vector<std::optional<DecodeAdapter>> own;
  int64_t rank = 0;
  for (size_t i = 0; i < block.shape.linears.size(); ++i) {
    if (block.shape.linears[i] != group) continue;
    const QuantizedTensor& weight = block.weights.projections[i].quantized;
    if (!is_like(weight, first)) return std::nullopt;
    found.columns = weight.shape[1];
    const auto& adapter = own.emplace_back(adapters != nullptr ? adapters->block(block.index)[i] : std::nullopt);
    found.linears.push_back({.packed = weight.packed,
                             .absmax = weight.absmax,
                             .nested_absmax = weight.nested_absmax,
                             .nested_offset = weight.nested_offset,
                             .rows = weight.shape[0],
                             .u_column = rank,
                             .b = adapter ? adapter->b : at::Tensor(),
                             .scaling = adapter ? adapter->scaling : 1.0});
    if (adapter) rank += adapter->b.size(1);
  }
  const JoinedInputs joined = JoinedInputs::of(own);
  if (!joined.together || joined.scaled) return std::nullopt;
  found.a = joined.a;
  found.bias = block.biases[static_cast<size_t>(group)];
  if (group == Group::kGateUp && found.linears.size() == 1 && !halve(found, first)) return std::nullopt;
  return found;
}

std::optional<ops::PassBlock> block_of(const BlockData& block, const DecodeAdapters* adapters, const Rotation& rotation,
                                       const KeyValueCache& cache, const QuantizedTensor& first) {
  const auto qkv = group_of(block, Group::kQkv, adapters, first), o = group_of(block, Group::kO, adapters, first);
  const auto gate_up = group_of(block, Group::kGateUp, adapters, first), down = group_of(block, Group::kDown, adapters, first);
  if (!qkv || !o || !gate_up || !down || gate_up->linears.size() != 2 || down->linears.size() != 1 || o->linears.size() != 1)
    return std::nullopt;
  ops::PassBlock found{.qkv = *qkv,
                       .o = *o,
                       .gate_up = *gate_up,
                       .down = *down,
                       .before_attention = block.norm(Site::kBeforeAttention),
                       .after_attention = block.norm(Site::kAfterAttention),
                       .before_mlp = block.norm(Site::kBeforeMlp),
                       .after_mlp = block.norm(Site::kAfterMlp),
                       .of_queries = block.norm(Site::kQuery),
                       .of_keys = block.norm(Site::kKey),
                       .cos = rotation.cos,
                       .sin = rotation.sin,
                       .keys = cache.keys,
                       .values = cache.values,
                       .window = block.shape.layer.window};
  if (found.of_queries.defined() != found.of_keys.defined()) return std::nullopt;
  if (found.of_queries.defined() && found.of_queries.numel() != block.shape.head_dim) return std::nullopt;
  if (found.cos.defined() && found.cos.size(1) == 0) found.cos = found.sin = at::Tensor();
  return rotation.query_scale.defined() ? std::nullopt : std::optional(std::move(found));
}

}  // namespace

std::unique_ptr<ops::DecodePass> decode_pass_of(CausalLM& model, const DecodeAdapters* adapters, const GenerationCache& cache,
                                                const at::Tensor& numbers) {
  Decoder& decoder = model.decoder();
  if (model.dtype() != at::kBFloat16 || decoder.weight_stream() || decoder.is_sharded()) return nullptr;
  if (adapters == nullptr && model.adapters().in_use()) return nullptr;
  const BlockShape& shape = decoder.blocks().front().shape();
  const QuantizedTensor& first = decoder.blocks().front().weights().projections.front().quantized;
  if (!first.defined()) return nullptr;
  ops::PassModel pass{.blocks = {},
                      .heads = shape.heads,
                      .kv_heads = shape.kv_heads,
                      .head_dim = shape.head_dim,
                      .capacity = cache.capacity,
                      .eps = shape.rms_norm_eps,
                      .attention_scale = shape.score_scale(),
                      .residual_factor = shape.residual_factor,
                      .norm_rule = shape.norm_rule,
                      .activation = shape.activation,
                      .interleaved = shape.interleaved,
                      .turns_before_norm = shape.turns_before_norm,
                      .block_size = first.block_size,
                      .nested_block_size = first.nested_block_size,
                      .quant_type = first.quant_type};
  for (size_t i = 0; i < decoder.blocks().size(); ++i) {
    const BlockData& block = decoder.blocks()[i].data();
    auto written = block_of(block, adapters, decoder.rope().last()[block.shape.layer.rope], cache.blocks[i], first);
    if (!written) return nullptr;
    pass.blocks.push_back(*std::move(written));
  }
  return ops::make_decode_pass(pass, numbers);
}

}  // namespace qlorapp
