// SPDX-License-Identifier: Apache-2.0
#include "nn/trained_head.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "../adapters/products.hpp"
#include "adapters/lora_projection.hpp"
#include "ops/memory_tape.hpp"
#include "ops/no_autocast.hpp"

namespace qlorapp {
namespace {

/// Two matrices of this many rows and V columns live at once, both in float32 while the softmax is computed.
constexpr int64_t kChunkRows = 256;

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct TrainedHead : torch::autograd::Function<TrainedHead> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& hidden, const at::Tensor& master, const at::Tensor& targets,
                            double factor, double cap) {
    at::Tensor head_gradient = at::zeros_like(master);
    HeadPass pass = trained_head_pass(hidden, master.to(hidden.scalar_type()), targets, {factor, cap}, std::nullopt, head_gradient);
    ctx->save_for_backward({pass.grad_hidden, head_gradient});
    return pass.loss;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const ops::NoAutocast no_autocast;
    const at::NoGradGuard no_grad;
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor upstream = grads[0].reshape({1});  // one-dimensional: else it is rounded to 16 bits before the product
    at::Tensor dhidden = at::empty_like(saved[0]);
    at::mul_out(dhidden, saved[0], upstream);
    return {dhidden, saved[1] * upstream, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

bool is_planned_for_cpu(const at::Tensor& tensor) {
  return tensor.is_meta() && ops::planned_device() != nullptr && ops::planned_device()->type == at::kCPU;
}

}  // namespace

HeadPass trained_head_pass(const at::Tensor& hidden_in, const at::Tensor& head, const at::Tensor& targets_in, ops::LogitRule logits,
                           const std::optional<at::Tensor>& grad_scale, const at::Tensor& head_gradient, int64_t target_count,
                           const std::optional<at::Tensor>& statistics) {
  const at::NoGradGuard no_grad;
  at::Tensor rows, hidden = hidden_in.detach().contiguous(), targets = targets_in;
  if (hidden.is_cpu()) {
    rows = targets.ge(0).nonzero().squeeze(1);
    hidden = hidden.index_select(0, rows);
    targets = targets.index_select(0, rows);
  } else if (is_planned_for_cpu(hidden) && target_count >= 0) {  // the same memory; Meta has no such operators in C++
    rows = at::empty({target_count}, targets.options());
    hidden = at::empty({target_count, hidden.size(1)}, hidden.options());
    targets = at::empty({target_count}, targets.options());
  }
  const at::ScalarType wide = hidden.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor grad_hidden = at::empty_like(hidden), total = at::zeros({}, hidden.options().dtype(at::kDouble));
  for (int64_t begin = 0; begin < hidden.size(0); begin += kChunkRows) {
    const int64_t size = std::min(kChunkRows, hidden.size(0) - begin);
    const at::Tensor h = hidden.narrow(0, begin, size), target = targets.narrow(0, begin, size);
    at::Tensor weight = target.ge(0).to(wide);
    const at::Tensor index = target.clamp_min(0).unsqueeze(1);
    // Not logsumexp: it has no Meta kernel in C++, and a plan runs this code on Meta tensors.
    at::Tensor z = at::mm(h, head.t()), slope;
    if (logits.factor != 1) z.mul_(logits.factor);
    if (logits.cap != 0) {
      const at::Tensor capped = z.div_(logits.cap).tanh_();
      slope = 1 - capped.to(wide).square();
      z = capped * logits.cap;
    }
    if (statistics) statistics->select(0, 1).add_(z.argmax(1).eq(target).sum());
    at::Tensor log_probabilities = at::_log_softmax(z.to(wide), 1, /*half_to_float=*/false);
    z.reset();
    total.sub_((log_probabilities.gather(1, index).squeeze(1) * weight).sum(at::kDouble));
    if (statistics) statistics->select(0, 0).sub_(((log_probabilities.exp() * log_probabilities).sum(1) * weight).sum());
    if (grad_scale && grad_scale->defined()) weight.mul_(grad_scale->to(wide));
    at::Tensor gradient = log_probabilities.exp_();
    gradient.scatter_add_(1, index, at::full_like(index, -1, gradient.options()));
    if (slope.defined()) gradient.mul_(slope);
    const at::Tensor dlogits = gradient.mul_(weight.unsqueeze(1).mul_(logits.factor)).to(h.scalar_type());
    at::Tensor dh = grad_hidden.narrow(0, begin, size);
    product_into(dh, dlogits, head);
    add_transposed_product(head_gradient, dlogits, h, 1.0);
  }
  if (rows.defined()) grad_hidden = at::zeros_like(hidden_in).index_copy_(0, rows, grad_hidden);
  return {total.to(wide), grad_hidden};
}

at::Tensor trained_head_loss(const at::Tensor& hidden, const at::Tensor& master, const at::Tensor& targets, ops::LogitRule logits) {
  return TrainedHead::apply(hidden, master, targets, logits.factor, logits.cap);
}

}  // namespace qlorapp
