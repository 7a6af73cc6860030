// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/train/optimizer.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "qlorapp/core/check.hpp"
#include "qlorapp/ops/adamw.hpp"
#include "qlorapp/ops/quantize.hpp"

namespace qlorapp {

AdamW::AdamW(AdapterArena& arena, const Options& options) : arena_(&arena), options_(options) {
  QLORAPP_CHECK_VALUE(arena.size() > 0, "[adamw] there are no adapters to train; call add_adapters first.");
  const at::Tensor& values = arena.values();
  if (options.state == State::kFloat32) {
    first_ = at::zeros_like(values);
    second_ = at::zeros_like(values);
    return;
  }
  // A zero moment is the code of 0.0 in each map, with a scale of zero.
  std::tie(first_, first_absmax_) = ops::quantize_blockwise(at::zeros_like(values), AdapterArena::kAlignment, /*is_signed=*/true);
  std::tie(second_, second_absmax_) = ops::quantize_blockwise(at::zeros_like(values), AdapterArena::kAlignment, /*is_signed=*/false);
}

void AdamW::step(double learning_rate) {
  const at::NoGradGuard no_grad;
  at::Tensor values = arena_->values();
  if (options_.state == State::kFloat32) {
    ops::adamw_(values, arena_->gradients(), first_, second_, steps_ + 1, learning_rate, options_.beta1, options_.beta2, options_.eps,
                options_.weight_decay);
  } else {
    ops::adamw_8bit_(values, arena_->gradients(), first_, second_, first_absmax_, second_absmax_, steps_ + 1, learning_rate,
                     options_.beta1, options_.beta2, options_.eps, options_.weight_decay);
  }
  ++steps_;
}

Bytes AdamW::state_bytes() const {
  Bytes total;
  for (const auto& [name, tensor] : state_tensors()) total += Bytes{static_cast<int64_t>(tensor.nbytes())};
  return total;
}

std::vector<std::pair<std::string, at::Tensor>> AdamW::state_tensors() const {
  if (options_.state == State::kFloat32) return {{"exp_avg", first_}, {"exp_avg_sq", second_}};
  return {{"state1", first_}, {"state2", second_}, {"absmax1", first_absmax_}, {"absmax2", second_absmax_}};
}

}  // namespace qlorapp
