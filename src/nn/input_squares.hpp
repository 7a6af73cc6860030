// SPDX-License-Identifier: Apache-2.0
/// How much each input channel of the linear layers carries: the sums of squares over the tokens that ran through. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>

#include <ATen/core/Tensor.h>

namespace qlorapp {

class InputSquares {
 public:
  /// @param first_slot  of the layers of a group, which read the same input.  @param x  (M, K).
  void add(int64_t block, size_t first_slot, const at::Tensor& x);
  /// (K) float64 on the CPU, the mean over the tokens; undefined where nothing ran. Synchronizes.
  [[nodiscard]] at::Tensor mean(int64_t block, size_t slot) const;

 private:
  struct Sum {
    at::Tensor squares;  ///< (K) float64, on the device.
    int64_t tokens = 0;
  };
  std::map<std::pair<int64_t, size_t>, Sum> sums_;
};

}  // namespace qlorapp
