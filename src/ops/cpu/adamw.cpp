// SPDX-License-Identifier: Apache-2.0
// AdamW in float32 on the CPU, in the exact order of roundings of torch.optim.AdamW(foreach=False, fused=False).
//
// torch's kernels contract some products and sums into fused multiply-adds and not others, differently per instruction set.
// So the same ATen operators are called here, but on pieces that stay in the L2 cache: seven passes over a piece cost one
// over memory. They are element-wise, so cutting the arena anywhere changes no bit.
//
// All memory is taken before the first write, scalars included: an update that fails for want of it has changed nothing.
#include <algorithm>
#include <array>
#include <cmath>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include "../adamw_check.hpp"

namespace qlorapp::ops {
namespace {

constexpr int64_t kPiece = 16384;  // five float arrays of this length are 320 KiB

void adamw_cpu(at::Tensor& parameter, const at::Tensor& gradient, at::Tensor& exp_avg, at::Tensor& exp_avg_sq, int64_t step,
               double lr, double beta1, double beta2, double eps, double weight_decay, const std::optional<at::Tensor>& multiplier,
               const std::optional<at::Tensor>& skip) {
  detail::check_adamw(parameter, gradient, exp_avg, exp_avg_sq, step, lr, beta1, beta2, eps, weight_decay, multiplier, skip);
  const int64_t n = parameter.numel();
  if (n == 0 || detail::number_or(skip, 0.0F) != 0.0F) return;
  const float factor = detail::number_or(multiplier, 1.0F);

  const auto t = static_cast<double>(step);
  const double step_size = lr / (1 - std::pow(beta1, t));
  const double bias_correction2_sqrt = std::sqrt(1 - std::pow(beta2, t));
  float* const p_data = parameter.data_ptr<float>();
  auto* const g_data = const_cast<float*>(gradient.const_data_ptr<float>());  // from_blob takes no const pointer; only read
  float* const m_data = exp_avg.data_ptr<float>();
  float* const v_data = exp_avg_sq.data_ptr<float>();

  // As tensors of the type that they would be cast to: no operator below makes one.
  std::array<float, 5> numbers{factor, static_cast<float>(1 - lr * weight_decay), static_cast<float>(beta2),
                               static_cast<float>(bias_correction2_sqrt), static_cast<float>(eps)};
  const auto number = [&](size_t i) { return at::from_blob(&numbers[i], {}, at::kFloat); };
  const int64_t piece = std::min(kPiece, n);
  const bool scales = factor != 1.0F;
  const at::Tensor scratch_of = at::empty({at::get_num_threads(), scales ? 2 : 1, piece}, at::kFloat);

  at::parallel_for(0, n, kPiece, [&](int64_t begin, int64_t end) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;  // per thread
    const at::Tensor own = scratch_of.select(0, at::get_thread_num());
    const at::Tensor scale = number(0), keep = number(1), second = number(2), correction = number(3), least = number(4);
    for (int64_t start = begin; start < end; start += kPiece) {
      const int64_t length = std::min(kPiece, end - start);
      at::Tensor p = at::from_blob(p_data + start, {length}, at::kFloat);
      at::Tensor g = at::from_blob(g_data + start, {length}, at::kFloat);
      if (scales) {
        at::Tensor product = own.select(0, 1).narrow(0, 0, length);
        g = at::mul_out(product, g, scale);
      }
      at::Tensor m = at::from_blob(m_data + start, {length}, at::kFloat);
      at::Tensor v = at::from_blob(v_data + start, {length}, at::kFloat);
      at::Tensor denominator = own.select(0, 0).narrow(0, 0, length);
      if (weight_decay != 0) p.mul_(keep);
      m.lerp_(g, 1 - beta1);
      v.mul_(second).addcmul_(g, g, 1 - beta2);
      at::sqrt_out(denominator, v);
      denominator.div_(correction).add_(least);
      p.addcdiv_(m, denominator, -step_size);
    }
  });
}

/// Squares in float within 512 elements, in double across.
std::tuple<at::Tensor, at::Tensor, at::Tensor> gradient_norm_cpu(const at::Tensor& gradient,
                                                                 const std::optional<at::Tensor>& inverse_scale, double max_norm) {
  detail::check_gradient_norm(gradient, inverse_scale, max_norm);
  const float inverse = detail::number_or(inverse_scale, 1.0F);
  const float* const g = gradient.const_data_ptr<float>();
  constexpr int64_t kRun = 512;
  double squares = 0;
  bool finite = true;
  for (int64_t begin = 0; begin < gradient.numel(); begin += kRun) {
    const int64_t end = std::min(gradient.numel(), begin + kRun);
    float sum = 0, zeros = 0;
#pragma omp simd reduction(+ : sum, zeros)
    for (int64_t i = begin; i < end; ++i) {
      const float value = g[i] * inverse;
      sum += value * value;
      zeros += value * 0.0F;  // NaN if value is not finite
    }
    squares += static_cast<double>(sum);
    finite = finite && zeros == 0.0F;
  }
  const auto norm = static_cast<float>(std::sqrt(squares));
  const float ratio = static_cast<float>(max_norm) / (norm + 1e-6F);
  const float multiplier = max_norm > 0 && !(ratio >= 1.0F) ? inverse * ratio : inverse;
  const auto number = [&](float value) { return at::full({}, value, gradient.options()); };
  return {number(norm), number(finite ? 0.0F : 1.0F), number(multiplier)};
}

}  // namespace

TORCH_LIBRARY_IMPL(qlorapp, CPU, m) {
  m.impl("gradient_norm", gradient_norm_cpu);
  m.impl("adamw_", adamw_cpu);
}

}  // namespace qlorapp::ops
