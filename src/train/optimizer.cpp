// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/train/optimizer.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <array>
#include <optional>
#include <string_view>
#include <utility>

#include "core/check.hpp"
#include "ops/adamw.hpp"
#include "train/paged_state.hpp"

namespace qlorapp {

AdamW::AdamW(AdapterArena& arena, const Options& options) : arena_(&arena), options_(options) {
  QLORAPP_CHECK_VALUE(arena.size() > 0, "[adamw] there are no adapters to train; call add_adapters first.");
  const at::Tensor& values = arena.values();
  moments_ = ops::adamw_moments(values, options.state == State::kEightBit);
  if (options.paged && !values.is_cpu()) paged_ = std::make_shared<PagedState>(std::exchange(moments_, {}), values.numel());
}

void AdamW::step(double learning_rate, const at::Tensor& multiplier, const at::Tensor& skip) {
  const at::NoGradGuard no_grad;
  if (paged_) {
    paged_->step([&](std::vector<at::Tensor>& moments, int64_t begin, int64_t count) {
      update(moments, begin, count, learning_rate, multiplier, skip);
    });
  } else {
    update(moments_, 0, arena_->values().numel(), learning_rate, multiplier, skip);
  }
  ++steps_;
}

void AdamW::update(std::vector<at::Tensor>& moments, int64_t begin, int64_t count, double learning_rate,
                   const at::Tensor& multiplier, const at::Tensor& skip) {
  at::Tensor values = arena_->values().narrow(0, begin, count);
  const at::Tensor gradients = arena_->gradients().narrow(0, begin, count);
  const auto given = [](const at::Tensor& number) { return number.defined() ? std::optional(number) : std::nullopt; };
  if (options_.state == State::kFloat32) {
    ops::adamw_(values, gradients, moments[0], moments[1], steps_ + 1, learning_rate, options_.beta1, options_.beta2, options_.eps,
                options_.weight_decay, given(multiplier), given(skip));
  } else {
    ops::adamw_8bit_(values, gradients, moments[0], moments[1], moments[2], moments[3], steps_ + 1, learning_rate, options_.beta1,
                     options_.beta2, options_.eps, options_.weight_decay, given(multiplier), given(skip));
  }
}

std::vector<at::Tensor> AdamW::moments() const { return paged_ ? paged_->tensors() : moments_; }

Bytes AdamW::state_bytes() const {
  if (paged_) return paged_->nbytes();
  Bytes total;
  for (const auto& [name, tensor] : state_tensors()) total += Bytes{static_cast<int64_t>(tensor.nbytes())};
  return total;
}

std::vector<std::pair<std::string, at::Tensor>> AdamW::state_tensors() const {
  static constexpr std::array<std::string_view, 2> kFloat32{"exp_avg", "exp_avg_sq"};
  static constexpr std::array<std::string_view, 4> kEightBit{"state1", "state2", "absmax1", "absmax2"};
  const std::vector<at::Tensor> found = moments();
  std::vector<std::pair<std::string, at::Tensor>> named;
  for (size_t i = 0; i < found.size(); ++i)
    named.emplace_back(options_.state == State::kFloat32 ? kFloat32[i] : kEightBit[i], found[i]);
  return named;
}

}  // namespace qlorapp
