// SPDX-License-Identifier: Apache-2.0
// The rules that every AdamW kernel's arguments keep, whatever the device. Included by the kernels only.
#pragma once

#include <cmath>
#include <optional>

#include <ATen/core/Tensor.h>

#include "ops/adamw.hpp"

namespace qlorapp::ops::detail {

inline void check_flat(const char* op, const char* name, const at::Tensor& tensor, at::ScalarType dtype, const c10::SymInt& numel) {
  TORCH_CHECK_VALUE(tensor.scalar_type() == dtype, "[", op, "] ", name, " must be ", dtype, "; got ", tensor.scalar_type(), ".");
  TORCH_CHECK_VALUE(tensor.is_contiguous(), "[", op, "] ", name, " must be contiguous. Pass a flat view of the arena.");
  TORCH_CHECK_VALUE(tensor.sym_numel() == numel, "[", op, "] ", name, " must have ", numel, " elements; got ", tensor.sym_numel(),
                    ".");
}

inline void check_same_device(const char* op, const at::Tensor& tensor, const at::Tensor& parameter) {
  TORCH_CHECK_VALUE(tensor.device() == parameter.device(), "[", op, "] every tensor must be on parameter's device, ",
                    parameter.device(), "; got one on ", tensor.device(), ". Move it.");
}

inline void check_options(const char* op, int64_t step, double lr, double beta1, double beta2, double eps, double weight_decay) {
  TORCH_CHECK_VALUE(step >= 1, "[", op, "] step counts from 1; got ", step, ".");
  TORCH_CHECK_VALUE(lr >= 0 && std::isfinite(lr), "[", op, "] lr must be finite and >= 0; got ", lr, ".");
  TORCH_CHECK_VALUE(beta1 >= 0 && beta1 < 1, "[", op, "] beta1 must be in [0, 1); got ", beta1, ".");
  TORCH_CHECK_VALUE(beta2 >= 0 && beta2 < 1, "[", op, "] beta2 must be in [0, 1); got ", beta2, ".");
  TORCH_CHECK_VALUE(eps >= 0 && std::isfinite(eps), "[", op, "] eps must be finite and >= 0; got ", eps, ".");
  TORCH_CHECK_VALUE(weight_decay >= 0 && std::isfinite(weight_decay), "[", op, "] weight_decay must be finite and >= 0; got ",
                    weight_decay, ".");
}

/// Numbers that the device reads: what gradient_norm returned.
inline void check_device_number(const char* op, const char* name, const std::optional<at::Tensor>& number, const at::Tensor& like) {
  if (!number.has_value() || !number->defined()) return;
  TORCH_CHECK_VALUE(number->scalar_type() == at::kFloat && number->sym_numel() == 1 && number->device() == like.device(), "[", op,
                    "] ", name, " must be one float32 on ", like.device(), "; got ", number->scalar_type(), " ",
                    number->sym_sizes(), " on ", number->device(), ". Pass what gradient_norm returned.");
}

/// For the CPU, where reading costs nothing.
inline float number_or(const std::optional<at::Tensor>& number, float otherwise) {
  return number.has_value() && number->defined() ? *number->const_data_ptr<float>() : otherwise;
}

inline void check_gradient_norm(const at::Tensor& gradient, const std::optional<at::Tensor>& inverse_scale, double max_norm) {
  check_flat("gradient_norm", "gradient", gradient, at::kFloat, gradient.sym_numel());
  check_device_number("gradient_norm", "inverse_scale", inverse_scale, gradient);
  TORCH_CHECK_VALUE(max_norm >= 0, "[gradient_norm] max_norm must be >= 0; got ", max_norm, ". 0 turns clipping off.");
}

inline void check_adamw(const at::Tensor& parameter, const at::Tensor& gradient, const at::Tensor& exp_avg,
                        const at::Tensor& exp_avg_sq, int64_t step, double lr, double beta1, double beta2, double eps,
                        double weight_decay, const std::optional<at::Tensor>& multiplier, const std::optional<at::Tensor>& skip) {
  const c10::SymInt n = parameter.sym_numel();
  check_flat("adamw_", "parameter", parameter, at::kFloat, n);
  check_flat("adamw_", "gradient", gradient, at::kFloat, n);
  check_flat("adamw_", "exp_avg", exp_avg, at::kFloat, n);
  check_flat("adamw_", "exp_avg_sq", exp_avg_sq, at::kFloat, n);
  for (const at::Tensor* tensor : {&gradient, &exp_avg, &exp_avg_sq}) check_same_device("adamw_", *tensor, parameter);
  check_device_number("adamw_", "multiplier", multiplier, parameter);
  check_device_number("adamw_", "skip", skip, parameter);
  check_options("adamw_", step, lr, beta1, beta2, eps, weight_decay);
}

inline void check_adamw_8bit(const at::Tensor& parameter, const at::Tensor& gradient, const at::Tensor& state1,
                             const at::Tensor& state2, const at::Tensor& absmax1, const at::Tensor& absmax2, int64_t step,
                             double lr, double beta1, double beta2, double eps, double weight_decay,
                             const std::optional<at::Tensor>& multiplier, const std::optional<at::Tensor>& skip) {
  const c10::SymInt n = parameter.sym_numel();
  check_flat("adamw_8bit_", "parameter", parameter, at::kFloat, n);
  check_flat("adamw_8bit_", "gradient", gradient, at::kFloat, n);
  check_flat("adamw_8bit_", "state1", state1, at::kByte, n);
  check_flat("adamw_8bit_", "state2", state2, at::kByte, n);
  const c10::SymInt blocks = (n + (kAdamW8bitBlock - 1)) / kAdamW8bitBlock;
  check_flat("adamw_8bit_", "absmax1", absmax1, at::kFloat, blocks);
  check_flat("adamw_8bit_", "absmax2", absmax2, at::kFloat, blocks);
  for (const at::Tensor* tensor : {&gradient, &state1, &state2, &absmax1, &absmax2})
    check_same_device("adamw_8bit_", *tensor, parameter);
  check_device_number("adamw_8bit_", "multiplier", multiplier, parameter);
  check_device_number("adamw_8bit_", "skip", skip, parameter);
  check_options("adamw_8bit_", step, lr, beta1, beta2, eps, weight_decay);
  TORCH_CHECK_VALUE(static_cast<float>(eps) > 0,
                    "[adamw_8bit_] eps must be > 0 in float32, because a stored second moment may round to 0; got ", eps, ".");
}

}  // namespace qlorapp::ops::detail
