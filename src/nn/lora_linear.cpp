// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/nn/lora_linear.hpp"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>
#include <mutex>
#include <utility>

#include "adapters/adapter_init.hpp"
#include "adapters/dora.hpp"
#include "adapters/lora_projection.hpp"
#include "adapters/merged_weight.hpp"
#include "core/check.hpp"
#include "nn/kept_outputs.hpp"
#include "ops/no_autocast.hpp"
#include "qlorapp/quant/quantizer.hpp"

namespace qlorapp {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// The frozen half and the constants, carried to backward. The weight is held packed.
struct LoraLinearState : torch::CustomClassHolder {
  FrozenWeight weight;
  double scaling = 1, dropout = 0;
  at::Tensor weight_norm_squared;
  std::optional<DropoutKey> key;
  bool has_adapter = true;

  [[nodiscard]] LoraAdapter adapter(const at::Tensor& a, const at::Tensor& b, const at::Tensor& magnitude) const {
    return {a, b, scaling, dropout, magnitude, weight_norm_squared};
  }
};

struct LoraLinearFunction : torch::autograd::Function<LoraLinearFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& a, const at::Tensor& b,
                            const std::optional<at::Tensor>& magnitude, const c10::intrusive_ptr<LoraLinearState>& state) {
    const auto compute = [&]() -> std::vector<at::Tensor> {
      at::Tensor y = at::empty({x.size(0), state->weight.out_features()}, x.options());
      const LoraAdapter adapter = state->adapter(a, b, magnitude.value_or(at::Tensor()));
      at::Tensor u = lora_projection_forward(y, x, state->weight, state->has_adapter ? &adapter : nullptr, state->key);
      return {std::move(y), std::move(u)};
    };
    KeptOutputs* const kept = kept_outputs_here();  // of the checkpointed block that calls this layer
    std::vector<at::Tensor> outputs = kept ? kept->get(compute) : compute();
    ctx->save_for_backward({x, a, b, outputs[1], magnitude.value_or(at::Tensor())});
    ctx->saved_data["state"] = c10::IValue::make_capsule(state);
    return std::move(outputs[0]);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const ops::NoAutocast no_autocast;
    const auto capsule = ctx->saved_data["state"].toCapsule();
    const auto& state = static_cast<const LoraLinearState&>(*capsule);
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &a = saved[1], &b = saved[2], &u = saved[3], &magnitude = saved[4];
    const at::Tensor dy = grads[0].contiguous();
    const LoraAdapter adapter = state.adapter(a, b, magnitude);
    LoraGradients gradients;
    if (state.has_adapter) {
      gradients = {at::zeros_like(a), at::zeros_like(b), magnitude.defined() ? at::zeros_like(magnitude) : at::Tensor()};
    }
    at::Tensor dx = ctx->needs_input_grad(0) ? at::empty_like(x) : at::Tensor();
    const LoraAdapter* const used = state.has_adapter ? &adapter : nullptr;
    const at::Tensor v = lora_projection_backward_input(dx.defined() ? &dx : nullptr, false, dy, state.weight, used, state.key);
    if (used) lora_projection_backward_adapter(dy, x, u, v, state.weight, *used, state.key, gradients);
    return {dx, gradients.a, gradients.b, gradients.magnitude, at::Tensor()};
  }
};

uint64_t draw_key() {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  return at::check_generator<at::CPUGeneratorImpl>(generator)->random64();
}

at::Device device_of(const FrozenWeight& weight) {
  return weight.quantized.defined() ? weight.quantized.packed.device() : weight.dense.device();
}

/// Calls visit with every tensor of a weight, defined or not.
template <class Visit>
void for_each_tensor(FrozenWeight& weight, const Visit& visit) {
  QuantizedTensor& q = weight.quantized;
  for (at::Tensor* const tensor : {&q.packed, &q.absmax, &q.nested_absmax, &q.nested_offset, &weight.dense}) visit(*tensor);
}

/// An own tensor object over the same memory, without a graph: what moves with the layer and with nothing else.
void make_own(at::Tensor& tensor) {
  if (tensor.defined()) tensor = tensor.detach();
}

FrozenWeight checked_base(FrozenWeight base) {
  const QuantizedTensor& q = base.quantized;
  QLORAPP_CHECK_VALUE(q.defined() || base.dense.defined(),
                      "[lora_linear] base must be a weight of shape (out, in); got an undefined one. Pass "
                      "FrozenWeight(Quantizer().quantize(weight)) or FrozenWeight(weight).");
  const std::vector<int64_t> shape = q.defined() ? q.shape : base.dense.sizes().vec();
  QLORAPP_CHECK_VALUE(shape.size() == 2 && shape[0] >= 1 && shape[1] >= 1,
                      "[lora_linear] base must have the shape (out, in), both at least 1; got {}.", joined(shape));
  if (q.defined()) {
    q.check("lora_linear");
  } else {
    QLORAPP_CHECK_VALUE(at::isFloatingType(base.dense.scalar_type()),
                        "[lora_linear] a dense base must be floating; got {}. Four-bit codes come as a QuantizedTensor.",
                        at::toString(base.dense.scalar_type()));
  }
  for_each_tensor(base, make_own);
  return base;
}

at::Tensor checked_bias(at::Tensor bias, const FrozenWeight& base) {
  if (!bias.defined()) return bias;
  QLORAPP_CHECK_VALUE(bias.dim() == 1 && bias.size(0) == base.out_features(),
                      "[lora_linear] bias must have the shape [{}]; got {}.", base.out_features(), joined(bias.sizes()));
  QLORAPP_CHECK_VALUE(at::isFloatingType(bias.scalar_type()), "[lora_linear] bias must be floating; got {}.",
                      at::toString(bias.scalar_type()));
  QLORAPP_CHECK_VALUE(bias.device() == device_of(base), "[lora_linear] bias must be on {}, where the base is; got {}.",
                      device_of(base).str(), bias.device().str());
  make_own(bias);
  return bias;
}

void check_input(const at::Tensor& x, const FrozenWeight& weight) {
  QLORAPP_CHECK_VALUE(x.defined(), "[lora_linear] x must be a tensor; got an undefined one.");
  QLORAPP_CHECK_VALUE(x.dim() >= 1 && x.size(-1) == weight.in_features(),
                      "[lora_linear] the last dimension of x must be {}; got a shape of {}.", weight.in_features(),
                      joined(x.sizes()));
  QLORAPP_CHECK_VALUE(at::isFloatingType(x.scalar_type()), "[lora_linear] x must be floating; got {}.",
                      at::toString(x.scalar_type()));
  QLORAPP_CHECK_VALUE(x.device() == device_of(weight),
                      "[lora_linear] x must be on {}, where the base is; got {}. Move x, or the layer with to(device).",
                      device_of(weight).str(), x.device().str());
  QLORAPP_CHECK_VALUE(
      weight.quantized.defined() || weight.dense.scalar_type() == x.scalar_type(),
      "[lora_linear] x must have the dtype of the dense weight, {}; got {}. Convert x, or a dense base with to(dtype).",
      at::toString(weight.dense.scalar_type()), at::toString(x.scalar_type()));
}

void move(at::Tensor& tensor, at::Device device) {
  if (!tensor.defined() || tensor.device() == device) return;
  const at::Tensor gradient = tensor.grad();
  tensor.mutable_grad().reset();
  tensor.set_data(tensor.detach().to(device));
  if (gradient.defined()) tensor.mutable_grad() = gradient.to(device);
}

}  // namespace

LoraLinear::LoraLinear(FrozenWeight base, const Options& options, uint64_t seed, at::Tensor bias)
    : base_(checked_base(std::move(base))), bias_(checked_bias(std::move(bias), base_)) {
  QLORAPP_CHECK_VALUE(options.r >= 1, "[lora_linear] r must be at least 1; got {}.", options.r);
  QLORAPP_CHECK_VALUE(std::isfinite(options.lora_alpha) && options.lora_alpha > 0,
                      "[lora_linear] lora_alpha must be finite and positive; got {}.", options.lora_alpha);
  QLORAPP_CHECK_VALUE(options.lora_dropout >= 0 && options.lora_dropout < 1,
                      "[lora_linear] lora_dropout must be in [0, 1); got {}.", options.lora_dropout);
  const auto options_of = at::TensorOptions().dtype(at::kFloat).device(device_of(base_));
  adapter_.a = at::empty({options.r, base_.in_features()}, options_of);
  adapter_.b = at::zeros({base_.out_features(), options.r}, options_of);
  initialize_lora_a(adapter_.a, options.gaussian_init, seed);
  if (options.use_dora) {  // the magnitude begins at the norm of each row, as B is zero
    adapter_.weight_norm_squared = squared_row_norms(base_);
    adapter_.magnitude = adapter_.weight_norm_squared.sqrt();
    adapter_.magnitude.set_requires_grad(true);
  }
  adapter_.a.set_requires_grad(true);
  adapter_.b.set_requires_grad(true);
  const auto r = static_cast<double>(options.r);
  adapter_.scaling = options.lora_alpha / (options.use_rslora ? std::sqrt(r) : r);
  adapter_.dropout = options.lora_dropout;
}

void LoraLinear::adopt_parameters(const at::Tensor& a, const at::Tensor& b, const at::Tensor& magnitude) {
  const auto same_kind = [](const at::Tensor& mine, const at::Tensor& other) {
    if (!mine.defined() || !other.defined()) return mine.defined() == other.defined();
    return mine.sizes() == other.sizes() && mine.scalar_type() == other.scalar_type() && mine.device() == other.device();
  };
  QLORAPP_CHECK_VALUE(same_kind(adapter_.a, a) && same_kind(adapter_.b, b) && same_kind(adapter_.magnitude, magnitude),
                      "[lora_linear] adopted parameters must have the shapes, dtype and device of a(), b() and magnitude().");
  adapter_.a = a;
  adapter_.b = b;
  adapter_.magnitude = magnitude;
}

std::vector<std::pair<std::string, at::Tensor>> LoraLinear::named_parameters(const std::string& prefix) const {
  const std::string start = prefix.empty() ? "" : prefix + ".";
  std::vector<std::pair<std::string, at::Tensor>> named{{start + "lora_A.weight", adapter_.a},
                                                        {start + "lora_B.weight", adapter_.b}};
  if (adapter_.magnitude.defined()) named.emplace_back(start + "lora_magnitude_vector", adapter_.magnitude);
  return named;
}

std::vector<at::Tensor> LoraLinear::parameters() const {
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : named_parameters()) tensors.push_back(tensor);
  return tensors;
}

void LoraLinear::to(at::Device device) {
  for (const at::Tensor& parameter : parameters()) {
    QLORAPP_CHECK_VALUE(
        parameter.device() == device || parameter.storage().nbytes() == parameter.nbytes(),
        "[lora_linear] A and B are parts of an arena, whose memory they must keep. Move the layer before adopt_parameters.");
  }
  const auto move_there = [device](at::Tensor& tensor) { move(tensor, device); };
  for_each_tensor(base_, move_there);
  if (merged_) for_each_tensor(*merged_, move_there);
  for (at::Tensor* const tensor : {&bias_, &adapter_.a, &adapter_.b, &adapter_.magnitude, &adapter_.weight_norm_squared})
    move_there(*tensor);
}

void LoraLinear::to(at::ScalarType dtype) {
  QLORAPP_CHECK_VALUE(at::isFloatingType(dtype), "[lora_linear] a weight must be floating; got {}.", at::toString(dtype));
  for (at::Tensor* const tensor : {&base_.dense, merged_ ? &merged_->dense : nullptr, &bias_}) {
    if (tensor != nullptr && tensor->defined()) tensor->set_data(tensor->to(dtype));
  }
}

at::Tensor LoraLinear::forward(const at::Tensor& x) const {
  QLORAPP_CHECK_VALUE(adapter_.dropout == 0,
                      "[lora_linear] a layer with lora_dropout requires a mode; got {} and none. Call forward(x, "
                      "training), or use LoraLinearModule, which follows train() and eval() of its torch::nn::Module.",
                      adapter_.dropout);
  return forward(x, false);
}

at::Tensor LoraLinear::forward(const at::Tensor& x, bool training) const {
  const FrozenWeight& weight = merged_ ? *merged_ : base_;
  check_input(x, weight);
  auto state = c10::make_intrusive<LoraLinearState>();
  state->weight = weight;
  state->has_adapter = !merged_;
  state->scaling = adapter_.scaling;
  state->dropout = adapter_.dropout;
  state->weight_norm_squared = adapter_.weight_norm_squared;
  if (training && adapter_.dropout > 0) state->key = DropoutKey{draw_key(), 0, 0};
  std::vector<int64_t> out_shape = x.sizes().vec();
  out_shape.back() = base_.out_features();
  const at::Tensor rows = x.reshape({-1, base_.in_features()}).contiguous();
  const std::optional<at::Tensor> magnitude = adapter_.magnitude.defined() ? std::optional(adapter_.magnitude) : std::nullopt;
  at::Tensor y = LoraLinearFunction::apply(rows, adapter_.a, adapter_.b, magnitude, state).view(out_shape);
  return bias_.defined() ? y + bias_.to(y.scalar_type()) : y;
}

void LoraLinear::merge(MergeInto into) {
  QLORAPP_CHECK_VALUE(!merged(), "[lora_linear] the layer is merged already; unmerge it first.");
  const bool is_packed = base_.quantized.defined();
  QLORAPP_CHECK_VALUE(into == MergeInto::kDense || is_packed,
                      "[lora_linear] only a four-bit base can be merged into four bits; this base is dense. Merge into kDense, or "
                      "quantize the weight first.");
  const at::NoGradGuard no_grad;
  const at::ScalarType dtype = is_packed ? base_.quantized.dtype : base_.dense.scalar_type();
  FrozenWeight weight = is_packed ? base_ : FrozenWeight(base_.dense.clone());  // which merged_weight() writes into
  at::Tensor sum = merged_weight(std::move(weight), &adapter_, nullptr, dtype);
  QLORAPP_CHECK_VALUE(sum.isfinite().all().item<bool>(),
                      "[lora_linear] the merged weight is not finite; the adapter seems to be broken. Nothing was changed.");
  merged_ =
      into == MergeInto::kFourBit ? FrozenWeight(Quantizer::like(base_.quantized).quantize(sum)) : FrozenWeight(std::move(sum));
}

void LoraLinear::unmerge() {
  QLORAPP_CHECK_VALUE(merged(), "[lora_linear] the layer is not merged.");
  merged_.reset();
}

}  // namespace qlorapp
