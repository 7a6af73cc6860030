// SPDX-License-Identifier: Apache-2.0
/// float16 with loss scaling: steps whose gradients overflow are skipped, and the scale finds its place by itself.
#include <ATen/ATen.h>

#include <cstdio>

#include "qlorapp/train/grad_scaler.hpp"

int main() {
  at::manual_seed(0);
  const at::Tensor truth = at::randn({8, 32});
  at::Tensor weight = at::zeros({8, 32}).requires_grad_();  // float32 master copy, float16 products
  qlorapp::GradScaler scaler({.device = at::kCPU, .init_scale = 1048576.0, .growth_interval = 100});

  int skipped = 0;
  double first = 0, last = 0;
  for (int step = 0; step < 200; ++step) {
    const at::Tensor x = at::randn({64, 32}).to(at::kHalf);
    const at::Tensor y = x.matmul(weight.t().to(at::kHalf));
    const at::Tensor loss = at::mse_loss(y.to(at::kFloat), x.to(at::kFloat).matmul(truth.t()));
    scaler.scale(loss).backward();  // in float16 the gradient of y is at most 65504: a scale that is too big overflows
    scaler.unscale_({weight.grad()});
    const bool stepped = scaler.step([&] {
      const at::NoGradGuard no_grad;
      weight.sub_(weight.grad(), /*alpha=*/1.0);
    });
    scaler.update();
    weight.mutable_grad().reset();
    if (!stepped) ++skipped;
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  std::printf("loss %.3f at first, %.2g at last; %d steps skipped, scale %.0f\n", first, last, skipped, scaler.get_scale());
  return skipped > 0 && skipped < 20 && last < 1e-3 * first ? 0 : 1;
}
