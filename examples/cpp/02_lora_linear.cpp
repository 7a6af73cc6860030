// SPDX-License-Identifier: Apache-2.0
/// A LoraLinear in a loop of one's own: its frozen four-bit base learns what a teacher of low rank adds to it.
#include <ATen/ATen.h>

#include <cstdio>

#include "qlorapp/nn/lora_linear.hpp"
#include "qlorapp/quant/quantizer.hpp"

int main() {
  at::manual_seed(0);
  constexpr int64_t kIn = 64, kOut = 48, kRank = 4;
  const qlorapp::Quantizer quantizer;
  const qlorapp::QuantizedTensor base = quantizer.quantize(at::randn({kOut, kIn}) / 8);
  const at::Tensor teacher = quantizer.dequantize(base) + at::randn({kOut, kRank}).matmul(at::randn({kRank, kIn})) / 16;

  const qlorapp::LoraLinear layer(qlorapp::FrozenWeight(base), {.r = kRank, .lora_alpha = 2 * kRank}, /*seed=*/1);
  double first = 0, last = 0;
  for (int step = 0; step < 300; ++step) {
    const at::Tensor x = at::randn({256, kIn});
    const at::Tensor loss = at::mse_loss(layer.forward(x), x.matmul(teacher.t()));
    loss.backward();
    const at::NoGradGuard no_grad;
    for (at::Tensor& parameter : layer.parameters()) {  // plain gradient descent; any optimizer takes these tensors
      parameter.sub_(parameter.grad(), /*alpha=*/0.3);
      parameter.mutable_grad().reset();
    }
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  std::printf("loss %.4f at first, %.2g at last; rank %lld of %lld\n", first, last, static_cast<long long>(layer.a().size(0)),
              static_cast<long long>(kIn));
  return last < 0.01 * first ? 0 : 1;
}
