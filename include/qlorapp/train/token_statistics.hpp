// SPDX-License-Identifier: Apache-2.0
/// Entropy and accuracy of a window's predictions, micro-batch by micro-batch.
#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "qlorapp/nn/batch.hpp"
#include "qlorapp/nn/micro_step.hpp"

namespace qlorapp {

/// Lives for one window. Does nothing for sums without statistics.
class TokenStatistics {
 public:
  /// A part of a micro-batch counts with its first part.
  void add(const Batch& batch, const LossSum& sum);
  /// (micro-batches, 3) float32 on the device: LossSum::statistics, and the number of targets. Undefined without any.
  [[nodiscard]] at::Tensor table() const;

 private:
  std::vector<at::Tensor> rows_;
};

}  // namespace qlorapp
