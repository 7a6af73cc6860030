// SPDX-License-Identifier: Apache-2.0
#include "adapters/dora.hpp"

#include <ATen/ATen.h>

#include "adapters/lora_projection.hpp"
#include "catch.hpp"
#include "nn/tiny_block.hpp"
#include "ops/dropout.hpp"
#include "qlorapp/quant/quantizer.hpp"
#include "reference/lora.hpp"

using namespace qlorapp;

namespace {

struct Layer {
  FrozenWeight weight;
  LoraAdapter adapter;
  at::Tensor dense;  ///< The weight that the codes stand for, in double.
};

Layer make_dora_layer(bool packed, double dropout, at::Device device = at::kCPU) {
  at::manual_seed(3);
  const at::Tensor values = at::randn({40, 64}) / 8;
  Layer layer;
  const Quantizer quantizer;
  const FrozenWeight weight = packed ? FrozenWeight(quantizer.quantize(values)) : FrozenWeight(values);
  layer.weight = packed ? FrozenWeight(weight.quantized.to(device)) : FrozenWeight(values.to(device));
  layer.dense = (packed ? quantizer.dequantize(weight.quantized, at::kFloat) : values).to(at::kDouble);
  layer.adapter = LoraAdapter{(at::randn({6, 64}) * 0.2).to(device), (at::randn({40, 6}) * 0.2).to(device), 1.5, dropout};
  layer.adapter.weight_norm_squared = squared_row_norms(layer.weight);
  layer.adapter.magnitude = (at::rand({40}) + 0.5).to(device);
  return layer;
}

/// (n) as (1, n).
reference::Matrix row(const at::Tensor& tensor) { return tiny::matrix(tensor.unsqueeze(0)); }

reference::LoraLayer twin(const Layer& layer) {
  const LoraAdapter& adapter = layer.adapter;
  return {tiny::matrix(layer.dense), tiny::matrix(adapter.a), tiny::matrix(adapter.b), adapter.scaling, row(adapter.magnitude)};
}

}  // namespace

TEST_CASE("the norm of DoRA is that of the dense sum of base and update, row by row", "[nn][cpu]") {
  for (const bool packed : {true, false}) {
    const Layer layer = make_dora_layer(packed, 0);
    REQUIRE(tiny::relative_error(dora_norm(layer.weight, layer.adapter).unsqueeze(0), twin(layer).norm()) < 1e-6);
  }
}

TEST_CASE("output and gradients of a DoRA projection equal the formula in double precision", "[nn][cpu]") {
  const bool packed = GENERATE(true, false);
  const double dropout = GENERATE(0.0, 0.4);
  const at::Device device = GENERATE(from_range(tiny::devices()));
  const Layer layer = make_dora_layer(packed, dropout, device);
  const LoraAdapter& adapter = layer.adapter;
  const at::Tensor x = at::randn({17, 64}).to(device), dy = at::randn({17, 40}).to(device);
  const DropoutKey key{5, 2, 1};

  const at::Tensor mask = dropout > 0 ? ops::seeded_dropout(at::ones_like(x), dropout, key) : at::ones_like(x);
  const reference::LoraPass wanted = reference::lora_pass(twin(layer), tiny::matrix(x), tiny::matrix(mask), tiny::matrix(dy));

  at::Tensor y = at::empty({17, 40}, x.options());
  const at::Tensor u = lora_projection_forward(y, x, layer.weight, &adapter, key);
  REQUIRE(tiny::relative_error(y, wanted.y) < 1e-6);
  LoraGradients gradients{at::zeros_like(adapter.a), at::zeros_like(adapter.b), at::zeros_like(adapter.magnitude)};
  at::Tensor dx = at::empty_like(x);
  const at::Tensor v = lora_projection_backward_input(&dx, false, dy, layer.weight, &adapter, key);
  lora_projection_backward_adapter(dy, x, u, v, layer.weight, adapter, key, gradients);
  REQUIRE(tiny::relative_error(dx, wanted.dx) < 2e-6);
  REQUIRE(tiny::relative_error(gradients.a, wanted.da) < 2e-6);
  REQUIRE(tiny::relative_error(gradients.b, wanted.db) < 2e-6);
  REQUIRE(tiny::relative_error(gradients.magnitude.unsqueeze(0), wanted.d_magnitude) < 2e-6);
  // Both halves add: a second pass doubles what is there.
  const at::Tensor before = dx.clone();
  const at::Tensor again = lora_projection_backward_input(&dx, true, dy, layer.weight, &adapter, key);
  lora_projection_backward_adapter(dy, x, u, again, layer.weight, adapter, key, gradients);
  REQUIRE(tiny::relative_error(dx, before * 2) < 1e-6);
  REQUIRE(tiny::relative_error(gradients.magnitude.unsqueeze(0), wanted.d_magnitude * 2) < 2e-6);
}
