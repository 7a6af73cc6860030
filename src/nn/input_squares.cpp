// SPDX-License-Identifier: Apache-2.0
#include "nn/input_squares.hpp"

#include <ATen/ATen.h>

namespace qlorapp {

void InputSquares::add(int64_t block, size_t first_slot, const at::Tensor& x) {
  Sum& sum = sums_[{block, first_slot}];
  const at::Tensor squares = x.to(at::kFloat).square().sum(0, /*keepdim=*/false, at::kDouble);
  sum.squares = sum.squares.defined() ? sum.squares + squares : squares;
  sum.tokens += x.size(0);
}

at::Tensor InputSquares::mean(int64_t block, size_t slot) const {
  auto found = sums_.upper_bound({block, slot});
  if (found == sums_.begin() || (--found)->first.first != block) return {};
  return found->second.squares.cpu() / static_cast<double>(found->second.tokens);
}

}  // namespace qlorapp
