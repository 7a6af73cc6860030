// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/nn/lora_linear_module.hpp"

#include <ATen/ATen.h>
#include <torch/serialize/input-archive.h>

#include <cmath>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "core/check.hpp"

namespace qlorapp {
namespace {

/// out, in, block_size, nested_block_size, quant_type, or out and in of a dense base.
at::Tensor geometry_of(const FrozenWeight& base) {
  const QuantizedTensor& q = base.quantized;
  if (!q.defined()) return at::tensor({base.out_features(), base.in_features()}, at::kLong);
  return at::tensor({q.shape[0], q.shape[1], q.block_size, q.nested_block_size, static_cast<int64_t>(q.quant_type)}, at::kLong);
}

}  // namespace

LoraLinearModuleImpl::LoraLinearModuleImpl(int64_t in_features, int64_t out_features, bool bias) : torch::nn::Module("LoraLinear") {
  QLORAPP_CHECK_VALUE(in_features >= 1 && out_features >= 1,
                      "[lora_linear] a layer needs at least one input and one output; got {} and {}.", in_features, out_features);
  const double bound = 1.0 / std::sqrt(static_cast<double>(in_features));
  weight_ = register_parameter("weight", at::empty({out_features, in_features}).uniform_(-bound, bound));
  if (bias) bias_ = register_parameter("bias", at::empty({out_features}).uniform_(-bound, bound));
}

LoraLinearModuleImpl::LoraLinearModuleImpl(FrozenWeight base, const LoraLinear::Options& options, uint64_t seed, at::Tensor bias)
    : torch::nn::Module("LoraLinear"), layer_(LoraLinear(std::move(base), options, seed, std::move(bias))) {
  hold_layer();
}

void LoraLinearModuleImpl::adapt(LoraLinear layer) {
  QLORAPP_CHECK_VALUE(is_plain(), "[lora_linear] the layer has an adapter already.");
  for (const char* const name : {"weight", "bias"}) {
    if (parameters_.contains(name)) parameters_.erase(name);
  }
  weight_.reset();
  bias_.reset();
  layer_ = std::move(layer);
  hold_layer();
}

void LoraLinearModuleImpl::hold_layer() {
  geometry_ = geometry_of(layer_->base());
  // The registered tensors are the layer's own objects: what replaces their data replaces the layer's.
  register_module("lora_A", std::make_shared<torch::nn::Module>("Weight"))->register_parameter("weight", layer_->a());
  register_module("lora_B", std::make_shared<torch::nn::Module>("Weight"))->register_parameter("weight", layer_->b());
  if (layer_->magnitude().defined()) register_parameter("lora_magnitude_vector", layer_->magnitude());
  const auto held = register_module("base_layer", std::make_shared<torch::nn::Module>("FrozenWeight"));
  const QuantizedTensor& q = layer_->base().quantized;
  const auto hold = [&held](const std::string& name, const at::Tensor& tensor) {
    if (tensor.defined()) held->register_buffer(name, tensor);
  };
  hold("weight", q.defined() ? q.packed : layer_->base().dense);
  hold("absmax", q.absmax);
  hold("nested_absmax", q.nested_absmax);
  hold("nested_offset", q.nested_offset);
  hold("bias", layer_->bias());
  hold("weight_norm_squared", layer_->adapter().weight_norm_squared);
  hold("geometry", geometry_);
}

LoraLinear& LoraLinearModuleImpl::layer() { return const_cast<LoraLinear&>(std::as_const(*this).layer()); }

const LoraLinear& LoraLinearModuleImpl::layer() const {
  QLORAPP_CHECK_VALUE(!is_plain(), "[lora_linear] this layer is a plain one. inject() gives it an adapter.");
  return *layer_;
}

at::Tensor LoraLinearModuleImpl::forward(const at::Tensor& x) {
  return is_plain() ? at::linear(x, weight_, bias_) : layer_->forward(x, is_training());
}

void LoraLinearModuleImpl::to(torch::Device device, torch::Dtype dtype, bool non_blocking) {
  to(device, non_blocking);
  to(dtype, non_blocking);
}

void LoraLinearModuleImpl::to(torch::Dtype dtype, bool non_blocking) {
  if (is_plain()) return torch::nn::Module::to(dtype, non_blocking);
  layer_->to(dtype);
}

void LoraLinearModuleImpl::to(torch::Device device, bool non_blocking) {
  if (is_plain()) return torch::nn::Module::to(device, non_blocking);
  layer_->to(device);
}

void LoraLinearModuleImpl::load(torch::serialize::InputArchive& archive) {
  if (is_plain()) return torch::nn::Module::load(archive);
  QLORAPP_CHECK_VALUE(!layer_->merged(), "[lora_linear] a merged layer cannot load another weight; unmerge it first.");
  const at::Tensor expected = geometry_.cpu().clone();
  const std::vector<int64_t> a = layer_->a().sizes().vec(), b = layer_->b().sizes().vec();
  torch::nn::Module::load(archive);
  QLORAPP_CHECK_VALUE(
      geometry_.cpu().equal(expected) && layer_->a().sizes() == a && layer_->b().sizes() == b,
      "[lora_linear] the file must hold a layer of the same shape, rank, block sizes and quant_type; it is of another kind.");
  if (layer_->base().quantized.defined()) layer_->base().quantized.check("lora_linear");
}

void LoraLinearModuleImpl::pretty_print(std::ostream& stream) const {
  if (is_plain()) {
    stream << "Linear(in_features=" << weight_.size(1) << ", out_features=" << weight_.size(0) << ", bias=" << bias_.defined()
           << ")";
    return;
  }
  stream << "LoraLinear(in_features=" << layer_->base().in_features() << ", out_features=" << layer_->base().out_features()
         << ", r=" << layer_->a().size(0) << ", scaling=" << layer_->scaling() << ", lora_dropout=" << layer_->dropout() << ")";
}

}  // namespace qlorapp
