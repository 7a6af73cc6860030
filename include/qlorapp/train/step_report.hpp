// SPDX-License-Identifier: Apache-2.0
/// The result of an optimizer step.
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace qlorapp {

/// Tensors stay on the device; reading one synchronizes.
struct StepReport {
  at::Tensor mean_loss;  ///< () floating: summed loss over the window's target tokens.
  /// () floating, before clipping. Not finite: the step changed nothing. Undefined if it was not computed.
  at::Tensor grad_norm;
  double learning_rate = 0;  ///< The one this step used.
  int64_t target_tokens = 0;
  int64_t input_tokens = 0;  ///< Padding is none.
  /// false when the scaler found an overflow. Without a scaler the host asks for nothing: see grad_norm.
  bool stepped = true;
};

}  // namespace qlorapp
