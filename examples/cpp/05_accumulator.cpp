// SPDX-License-Identifier: Apache-2.0
/// Micro-batches of unequal size give the gradient of one big batch, because the targets of all are counted first.
#include <ATen/ATen.h>

#include <array>
#include <cstdio>

#include "qlorapp/train/accumulator.hpp"

int main() {
  at::manual_seed(0);
  constexpr std::array<int64_t, 4> kTargets{3, 40, 1, 17};  // rows of the micro-batches; the last window of an epoch is like that
  const at::Tensor x = at::randn({61, 16}, at::kDouble), labels = at::randint(0, 5, {61}, at::kLong);
  at::Tensor weight = (at::randn({5, 16}, at::kDouble) / 4).requires_grad_();

  at::cross_entropy_loss(x.matmul(weight.t()), labels).backward();  // the mean over all 61
  const at::Tensor expected = weight.grad().clone();
  weight.mutable_grad().reset();

  qlorapp::Accumulator accumulator(kTargets);
  int64_t row = 0;
  for (const int64_t rows : kTargets) {
    const at::Tensor logits = x.slice(0, row, row + rows).matmul(weight.t());
    const at::Tensor loss_sum = at::cross_entropy_loss(logits, labels.slice(0, row, row + rows), {}, at::Reduction::Sum);
    accumulator.share_of(loss_sum).backward();
    row += rows;
  }
  const double difference = ((weight.grad() - expected).norm() / expected.norm()).item<double>();
  std::printf("mean loss %.4f over %lld targets; gradient differs by %.1e\n", accumulator.mean_loss().item<double>(),
              static_cast<long long>(accumulator.tokens()), difference);
  return difference < 1e-12 && accumulator.tokens() == 61 ? 0 : 1;
}
