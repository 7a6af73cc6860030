// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cmath>
#include <memory>
#include <mutex>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "../adamw_check.hpp"
#include "cuda/adamw.hpp"
#include "cuda/gradient_norm.hpp"
#include "launch.hpp"

namespace qlorapp::ops {
namespace {

std::tuple<at::Tensor, at::Tensor, at::Tensor> gradient_norm_cuda(const at::Tensor& gradient,
                                                                  const std::optional<at::Tensor>& inverse_scale, double max_norm) {
  detail::check_gradient_norm(gradient, inverse_scale, max_norm);
  const gpu::Launch launch(gradient);
  at::Tensor norm = at::empty({}, gradient.options()), found_inf = at::empty({}, gradient.options());
  at::Tensor multiplier = at::empty({}, gradient.options());
  const at::Tensor workspace = at::empty({cuda::kGradientNormWorkspace}, gradient.options().dtype(at::kByte));
  C10_CUDA_CHECK(cuda::gradient_norm(gradient.const_data_ptr<float>(), gradient.numel(), gpu::device_number(inverse_scale),
                                     static_cast<float>(max_norm), workspace.mutable_data_ptr(), norm.mutable_data_ptr<float>(),
                                     found_inf.mutable_data_ptr<float>(), multiplier.mutable_data_ptr<float>(), launch.stream()));
  return {norm, found_inf, multiplier};
}

/// The numbers of a step as each CPU operator rounds them.
cuda::AdamWStep step_of(int64_t step, double lr, double beta1, double beta2, double eps, double weight_decay,
                        const std::optional<at::Tensor>& multiplier, const std::optional<at::Tensor>& skip) {
  const auto t = static_cast<double>(step);
  return {.beta1 = static_cast<float>(beta1),
          .one_minus_beta1 = static_cast<float>(1 - beta1),
          .beta2 = static_cast<float>(beta2),
          .one_minus_beta2 = static_cast<float>(1 - beta2),
          .correction2 = static_cast<float>(std::sqrt(1 - std::pow(beta2, t))),
          .eps = static_cast<float>(eps),
          .negative_step = static_cast<float>(-(lr / (1 - std::pow(beta1, t)))),
          .decay = static_cast<float>(1 - lr * weight_decay),
          .multiplier = gpu::device_number(multiplier),
          .skip = gpu::device_number(skip)};
}

void adamw_cuda(at::Tensor& parameter, const at::Tensor& gradient, at::Tensor& exp_avg, at::Tensor& exp_avg_sq, int64_t step,
                double lr, double beta1, double beta2, double eps, double weight_decay, const std::optional<at::Tensor>& multiplier,
                const std::optional<at::Tensor>& skip) {
  detail::check_adamw(parameter, gradient, exp_avg, exp_avg_sq, step, lr, beta1, beta2, eps, weight_decay, multiplier, skip);
  const gpu::Launch launch(parameter);
  C10_CUDA_CHECK(cuda::adamw(parameter.mutable_data_ptr<float>(), gradient.const_data_ptr<float>(),
                             exp_avg.mutable_data_ptr<float>(), exp_avg_sq.mutable_data_ptr<float>(), parameter.numel(),
                             step_of(step, lr, beta1, beta2, eps, weight_decay, multiplier, skip), launch.stream()));
}

/// The tables on a device, copied there once a process and kept. The copy is stream-ordered; later streams see it finished,
/// because it synchronizes, this one time.
const cuda::DynamicMapTables* tables_on(c10::DeviceIndex device) {
  static std::mutex mutex;
  static std::array<void*, 64> tables{};
  TORCH_CHECK_VALUE(device >= 0 && static_cast<size_t>(device) < tables.size(), "[adamw_8bit_] device index must be below 64; got ",
                    static_cast<int>(device), ".");
  const std::lock_guard lock(mutex);
  void*& found = tables[static_cast<size_t>(device)];
  if (found == nullptr) {
    static const auto host = [] {
      auto filled = std::make_unique<cuda::DynamicMapTables>();
      cuda::fill(*filled);
      return filled;
    }();
    void* memory = nullptr;
    C10_CUDA_CHECK(cudaMalloc(&memory, sizeof *host));
    C10_CUDA_CHECK(cudaMemcpy(memory, host.get(), sizeof *host, cudaMemcpyHostToDevice));
    found = memory;
  }
  return static_cast<const cuda::DynamicMapTables*>(found);
}

void adamw_8bit_cuda(at::Tensor& parameter, const at::Tensor& gradient, at::Tensor& state1, at::Tensor& state2, at::Tensor& absmax1,
                     at::Tensor& absmax2, int64_t step, double lr, double beta1, double beta2, double eps, double weight_decay,
                     const std::optional<at::Tensor>& multiplier, const std::optional<at::Tensor>& skip) {
  detail::check_adamw_8bit(parameter, gradient, state1, state2, absmax1, absmax2, step, lr, beta1, beta2, eps, weight_decay,
                           multiplier, skip);
  const gpu::Launch launch(parameter);
  C10_CUDA_CHECK(cuda::adamw_8bit(parameter.mutable_data_ptr<float>(), gradient.const_data_ptr<float>(),
                                  state1.mutable_data_ptr<uint8_t>(), state2.mutable_data_ptr<uint8_t>(),
                                  absmax1.mutable_data_ptr<float>(), absmax2.mutable_data_ptr<float>(), parameter.numel(),
                                  step_of(step, lr, beta1, beta2, eps, weight_decay, multiplier, skip),
                                  tables_on(parameter.device().index()), launch.stream()));
}

}  // namespace

TORCH_LIBRARY_IMPL(qlorapp, CUDA, m) {
  m.impl("gradient_norm", gradient_norm_cuda);
  m.impl("adamw_", adamw_cuda);
  m.impl("adamw_8bit_", adamw_8bit_cuda);
}

}  // namespace qlorapp::ops
