// SPDX-License-Identifier: Apache-2.0
/// A weight to four bits and back.
#include <ATen/ATen.h>

#include <cstdio>

#include "qlorapp/quant/quantizer.hpp"

int main() {
  at::manual_seed(0);
  const at::Tensor weight = at::randn({1024, 1024}) * 0.02;

  const qlorapp::Quantizer quantizer;  // NF4, blocks of 64, scales in eight bits
  const qlorapp::QuantizedTensor q = quantizer.quantize(weight);
  const at::Tensor back = quantizer.dequantize(q);  // float32 again, as the weight was

  const double bits = 8.0 * static_cast<double>(q.nbytes().count) / static_cast<double>(weight.numel());
  const double error = ((back - weight).norm() / weight.norm()).item<double>();
  std::printf("%.3f bits an element, relative error %.4f\n", bits, error);

  // What is on the grid stays there: a second round changes nothing but the last bits of the scales.
  const qlorapp::QuantizedTensor again = quantizer.quantize(back);
  const bool same_codes = again.packed.equal(q.packed);
  std::printf("quantized again: %s codes\n", same_codes ? "the same" : "other");
  return bits < 4.13 && error < 0.1 && same_codes ? 0 : 1;
}
