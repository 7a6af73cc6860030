// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/nn/lora_linear.hpp"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>
#include <mutex>
#include <utility>

#include "qlorapp/core/check.hpp"
#include "qlorapp/nn/adapter_init.hpp"
#include "qlorapp/ops/no_autocast.hpp"
#include "qlorapp/quant/quantizer.hpp"

namespace qlorapp {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// The frozen half and the constants, carried to backward. The weight is held packed.
struct LoraLinearState : torch::CustomClassHolder {
  FrozenWeight weight;
  double scaling = 1, dropout = 0;
  std::optional<DropoutKey> key;
  bool has_adapter = true;

  [[nodiscard]] LoraAdapter adapter(const at::Tensor& a, const at::Tensor& b) const { return {a, b, scaling, dropout}; }
};

struct LoraLinearFunction : torch::autograd::Function<LoraLinearFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& a, const at::Tensor& b,
                            const c10::intrusive_ptr<LoraLinearState>& state) {
    at::Tensor y = at::empty({x.size(0), state->weight.out_features()}, x.options());
    const LoraAdapter adapter = state->adapter(a, b);
    at::Tensor u = lora_projection_forward(y, x, state->weight, state->has_adapter ? &adapter : nullptr, state->key);
    ctx->save_for_backward({x, a, b, u});
    ctx->saved_data["state"] = c10::IValue::make_capsule(state);
    return y;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const ops::NoAutocast no_autocast;
    const auto capsule = ctx->saved_data["state"].toCapsule();
    const auto& state = static_cast<const LoraLinearState&>(*capsule);
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &a = saved[1], &b = saved[2], &u = saved[3];
    const at::Tensor dy = grads[0].contiguous();
    const LoraAdapter adapter = state.adapter(a, b);
    LoraGradients gradients;
    if (state.has_adapter) gradients = {at::zeros_like(a), at::zeros_like(b)};
    at::Tensor dx = ctx->needs_input_grad(0) ? at::empty_like(x) : at::Tensor();
    const LoraAdapter* const used = state.has_adapter ? &adapter : nullptr;
    const at::Tensor v = lora_projection_backward_input(dx.defined() ? &dx : nullptr, false, dy, state.weight, used, state.key);
    if (used) lora_projection_backward_adapter(dy, x, u, v, state.weight, *used, state.key, gradients);
    return {dx, gradients.a, gradients.b, at::Tensor()};
  }
};

uint64_t draw_key() {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  return at::check_generator<at::CPUGeneratorImpl>(generator)->random64();
}

}  // namespace

LoraLinear::LoraLinear(FrozenWeight base, const Options& options, uint64_t seed, at::Tensor bias)
    : base_(std::move(base)), bias_(std::move(bias)) {
  QLORAPP_CHECK_VALUE(options.r >= 1, "[lora_linear] r must be at least 1; got ", options.r, ".");
  QLORAPP_CHECK_VALUE(std::isfinite(options.lora_alpha) && options.lora_alpha > 0,
                      "[lora_linear] lora_alpha must be finite and positive; got ", options.lora_alpha, ".");
  QLORAPP_CHECK_VALUE(options.lora_dropout >= 0 && options.lora_dropout < 1, "[lora_linear] lora_dropout must be in [0, 1); got ",
                      options.lora_dropout, ".");
  const at::Device device = base_.quantized.defined() ? base_.quantized.packed.device() : base_.dense.device();
  const auto options_of = at::TensorOptions().dtype(at::kFloat).device(device);
  adapter_.a = at::empty({options.r, base_.in_features()}, options_of);
  adapter_.b = at::zeros({base_.out_features(), options.r}, options_of);
  initialize_lora_a(adapter_.a, options.gaussian_init, seed);
  adapter_.a.set_requires_grad(true);
  adapter_.b.set_requires_grad(true);
  const auto r = static_cast<double>(options.r);
  adapter_.scaling = options.lora_alpha / (options.use_rslora ? std::sqrt(r) : r);
  adapter_.dropout = options.lora_dropout;
}

void LoraLinear::adopt_parameters(const at::Tensor& a, const at::Tensor& b) {
  const auto same_kind = [](const at::Tensor& mine, const at::Tensor& other) {
    return mine.sizes() == other.sizes() && mine.scalar_type() == other.scalar_type() && mine.device() == other.device();
  };
  QLORAPP_CHECK_VALUE(same_kind(adapter_.a, a) && same_kind(adapter_.b, b),
                      "[lora_linear] adopted parameters must have the shapes, dtype and device of a() and b().");
  adapter_.a = a;
  adapter_.b = b;
}

at::Tensor LoraLinear::forward(const at::Tensor& x) const {
  QLORAPP_CHECK_VALUE(x.dim() >= 1 && x.size(-1) == base_.in_features(), "[lora_linear] the last dimension of x must be ",
                      base_.in_features(), "; got a shape of ", x.sizes().vec(), ".");
  auto state = c10::make_intrusive<LoraLinearState>();
  state->weight = merged_ ? *merged_ : base_;
  state->has_adapter = !merged_;
  state->scaling = adapter_.scaling;
  state->dropout = adapter_.dropout;
  if (training_ && adapter_.dropout > 0) state->key = DropoutKey{draw_key(), 0, 0};
  std::vector<int64_t> out_shape = x.sizes().vec();
  out_shape.back() = base_.out_features();
  const at::Tensor rows = x.reshape({-1, base_.in_features()}).contiguous();
  at::Tensor y = LoraLinearFunction::apply(rows, adapter_.a, adapter_.b, state).view(out_shape);
  return bias_.defined() ? y + bias_.to(y.scalar_type()) : y;
}

void LoraLinear::merge(MergeInto into) {
  QLORAPP_CHECK_VALUE(!merged(), "[lora_linear] the layer is merged already; unmerge it first.");
  const at::NoGradGuard no_grad;
  const Quantizer quantizer = base_.quantized.defined() ? Quantizer::like(base_.quantized) : Quantizer{};
  const at::ScalarType dtype = base_.quantized.defined() ? base_.quantized.dtype : base_.dense.scalar_type();
  at::Tensor sum = base_.quantized.defined() ? quantizer.dequantize(base_.quantized, at::kFloat) : base_.dense.to(at::kFloat);
  sum.addmm_(adapter_.b, adapter_.a, 1, adapter_.scaling);
  QLORAPP_CHECK_VALUE(sum.isfinite().all().item<bool>(),
                      "[lora_linear] the merged weight is not finite; the adapter seems to be broken. Nothing was changed.");
  if (into == MergeInto::kFourBit && base_.quantized.defined()) {
    merged_ = FrozenWeight(quantizer.quantize(sum.to(dtype)));
  } else {
    merged_ = FrozenWeight(sum.to(dtype));
  }
}

void LoraLinear::unmerge() {
  QLORAPP_CHECK_VALUE(merged(), "[lora_linear] the layer is not merged.");
  merged_.reset();
}

}  // namespace qlorapp
