// SPDX-License-Identifier: Apache-2.0
/// A small block with random weights, as ours and as the reference sees it.
#pragma once

#include <ATen/ATen.h>

#include "nn/block/decoder_block.hpp"
#include "nn/decoder.hpp"
#include "nn/eigen_tensors.hpp"
#include "nn/step_context.hpp"
#include "qlorapp/io/device.hpp"
#include "qlorapp/quant/quantizer.hpp"
#include "reference/decoder.hpp"

namespace tiny {

inline const qlorapp::DecoderBlock::Shape kShape{
    .hidden = 48, .intermediate = 88, .heads = 6, .kv_heads = 2, .head_dim = 8, .rms_norm_eps = 1e-5};

/// The block's shape with what the reference's options say, and the tensors that those add, behind the norms.
inline qlorapp::DecoderBlock::Shape shape_of(const reference::Block& block, qlorapp::DecoderBlock::Shape shape,
                                             std::vector<at::Tensor>& dense, at::ScalarType dtype) {
  using qlorapp::format::Site;
  dense.clear();
  shape.norms.clear();
  const auto add = [&](const reference::Values& values) {
    dense.push_back(at::tensor(at::ArrayRef<double>(values), at::kDouble).to(dtype));
  };
  const std::vector<std::pair<Site, const reference::Values*>> norms{{Site::kBeforeAttention, &block.input_norm},
                                                                     {Site::kBeforeMlp, &block.post_attention_norm},
                                                                     {Site::kAfterAttention, &block.after_attention},
                                                                     {Site::kAfterMlp, &block.after_mlp},
                                                                     {Site::kQuery, &block.q_norm},
                                                                     {Site::kKey, &block.k_norm}};
  for (const auto& [site, values] : norms) {
    if (values->empty()) continue;
    shape.norms.push_back(site);
    add(*values);
  }
  shape.biases.assign(7, std::nullopt);
  for (size_t i = 0; i < 7; ++i) {
    if (block.bias[i].empty()) continue;
    shape.biases[i] = dense.size();
    add(block.bias[i]);
  }
  if (block.one_plus) shape.norm_rule = qlorapp::format::NormRule::kOnePlus;
  if (block.activation == reference::Activation::kGeluTanh) shape.activation = qlorapp::format::Activation::kGeluTanh;
  shape.attention_scale = block.attention_scale;
  shape.residual_factor = block.residual_factor;
  shape.interleaved = block.rotary.interleaved;
  shape.turns_before_norm = block.turns_before_norm;
  shape.layer.window = block.window;
  return shape;
}

struct Both {
  qlorapp::DecoderBlock ours;
  reference::Block reference;
};

/// @param targets  which of the seven projections get an adapter.
inline Both make_block(at::ScalarType dtype, std::array<bool, 7> targets = {true, true, true, true, true, true, true},
                       int64_t rank = 4, double dropout = 0, const qlorapp::DecoderBlock::Shape& shape = kShape,
                       void (*option)(reference::Block&) = nullptr) {
  using namespace qlorapp;
  at::manual_seed(7);
  const int64_t q = shape.attention_width(), kv = shape.kv_heads * shape.head_dim;
  const std::array<std::pair<int64_t, int64_t>, 7> sizes{{{q, shape.hidden},
                                                          {kv, shape.hidden},
                                                          {kv, shape.hidden},
                                                          {shape.hidden, q},
                                                          {shape.intermediate, shape.hidden},
                                                          {shape.intermediate, shape.hidden},
                                                          {shape.hidden, shape.intermediate}}};
  DecoderBlock::Weights weights;
  for (int i = 0; i < 2; ++i) weights.dense.push_back((at::rand({shape.hidden}) + 0.5).to(dtype));
  reference::Block dense{shape.heads,
                         shape.kv_heads,
                         shape.head_dim,
                         shape.rms_norm_eps,
                         tests::values(weights.dense[0]),
                         tests::values(weights.dense[1]),
                         {},
                         {}};
  const Quantizer quantizer;
  DecoderBlock::Adapters adapters(7);
  for (size_t i = 0; i < 7; ++i) {
    const auto [out, in] = sizes[i];
    const QuantizedTensor quantized = quantizer.quantize(at::randn({out, in}) / std::sqrt(static_cast<double>(in)));
    dense.weights[i] = matrix(quantizer.dequantize(quantized, at::kFloat).to(dtype));
    weights.projections.emplace_back(quantized);
    if (!targets[i]) continue;
    const at::ScalarType adapter_dtype = dtype == at::kDouble ? at::kDouble : at::kFloat;
    at::Tensor a = (at::randn({rank, in}) * 0.1).to(adapter_dtype), b = (at::randn({out, rank}) * 0.1).to(adapter_dtype);
    adapters[i] = LoraAdapter{a, b, 2.0, dropout};
    dense.lora[i] = {matrix(a), matrix(b), 2.0};
  }
  if (option != nullptr) option(dense);
  const DecoderBlock::Shape own = shape_of(dense, shape, weights.dense, dtype);
  Both both{DecoderBlock(own, std::move(weights), 0), std::move(dense)};
  both.ours.adapters() = std::move(adapters);
  return both;
}

/// @param width  elements of a head that turn; 0: all. Behind the rotation comes one that turns nothing.
inline qlorapp::StepContext make_context(const std::vector<int64_t>& row_starts, const qlorapp::DecoderBlock::Shape& shape = kShape,
                                         int64_t width = 0) {
  using qlorapp::format::RopeSettings;
  qlorapp::StepContext context;
  RopeSettings own, still;
  own.width = width == 0 ? shape.head_dim : width;
  still.type = RopeSettings::Type::kNone, still.width = shape.head_dim;
  qlorapp::RopeTables tables({own, still}, at::kCPU);
  std::vector<at::Tensor> positions;
  int64_t longest = 0;
  for (size_t r = 0; r + 1 < row_starts.size(); ++r) {
    positions.push_back(at::arange(row_starts[r + 1] - row_starts[r], at::kLong));
    longest = std::max(longest, row_starts[r + 1] - row_starts[r]);
  }
  context.rotations = tables.reserve(longest);
  context.positions = at::cat(positions);
  context.row_starts = row_starts;
  context.seed = 11;
  return context;
}

/// The same rows for the oracle.
inline reference::Rows reference_rows(const qlorapp::StepContext& context) {
  const qlorapp::Rotation& rotation = context.rotations.front();
  return {tests::values(rotation.cos.cpu()), tests::values(rotation.sin.cpu()), context.row_starts};
}

/// The CPU, and a GPU where there is one.
inline std::vector<at::Device> devices() {
  std::vector<at::Device> all{at::kCPU};
  if (qlorapp::has_gpu()) all.emplace_back(at::kCUDA, 0);
  return all;
}

inline qlorapp::DecoderBlock on(at::Device device, const qlorapp::DecoderBlock& block) {
  using namespace qlorapp;
  DecoderBlock::Weights weights = block.weights();
  for (at::Tensor& dense : weights.dense) dense = dense.to(device);
  for (FrozenWeight& weight : weights.projections) weight = FrozenWeight(weight.quantized.to(device));
  DecoderBlock moved(block.shape(), std::move(weights), block.index());
  moved.adapters() = block.adapters();
  for (auto& adapter : moved.adapters()) {
    if (adapter) adapter->a = adapter->a.detach().to(device), adapter->b = adapter->b.detach().to(device);
  }
  return moved;
}

inline qlorapp::StepContext on(at::Device device, qlorapp::StepContext context) {
  for (qlorapp::Rotation& rotation : context.rotations) {
    rotation.cos = rotation.cos.to(device);
    rotation.sin = rotation.sin.to(device);
  }
  context.positions = context.positions.to(device);
  return context;
}

inline qlorapp::DecoderBlock::Gradients zero_gradients(const qlorapp::DecoderBlock& block) {
  qlorapp::DecoderBlock::Gradients gradients(block.adapters().size());
  for (size_t i = 0; i < 7; ++i) {
    if (const auto& adapter = block.adapters()[i]) gradients[i] = {at::zeros_like(adapter->a), at::zeros_like(adapter->b)};
  }
  return gradients;
}

/// ‖x - y‖ / ‖y‖ in double.
inline double relative_error(const at::Tensor& x, const at::Tensor& y) {
  const at::Tensor ours = x.cpu().to(at::kDouble), wanted = y.cpu().to(at::kDouble);
  return ((ours - wanted).norm() / wanted.norm()).item<double>();
}

}  // namespace tiny
