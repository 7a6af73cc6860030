// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/nn/lora_linear.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "catch.hpp"
#include "core/check.hpp"
#include "nn/tiny_block.hpp"
#include "qlorapp/nn/checkpointed_block.hpp"
#include "reference/lora.hpp"

using namespace qlorapp;

namespace {

QuantizedTensor make_weight(int64_t out, int64_t in) {
  at::manual_seed(3);
  return Quantizer().quantize(at::randn({out, in}));
}

void randomize(const LoraLinear& layer) {
  const at::NoGradGuard no_grad;
  layer.b().normal_();
}

reference::LoraPass pass_of(const LoraLinear& layer, const at::Tensor& weight, double scaling, const at::Tensor& x,
                            const at::Tensor& dy) {
  reference::LoraLayer twin{tiny::matrix(weight), tiny::matrix(layer.a().detach()), tiny::matrix(layer.b().detach()), scaling, {}};
  if (layer.magnitude().defined()) twin.magnitude = tiny::matrix(layer.magnitude().detach().unsqueeze(0));
  const reference::Matrix input = tiny::matrix(x.detach());
  return reference::lora_pass(twin, input, reference::Matrix::Ones(input.rows(), input.cols()), tiny::matrix(dy));
}

}  // namespace

TEST_CASE("LoraLinear's output and gradients equal a dense double-precision layer", "[nn][cpu]") {
  const at::ScalarType dtype = GENERATE(at::kDouble, at::kFloat, at::kBFloat16);
  const double tolerance = dtype == at::kDouble ? 2e-7 : dtype == at::kFloat ? 2e-6 : 2e-2;  // A and B are float32
  const QuantizedTensor weight = make_weight(40, 24);
  LoraLinear layer(FrozenWeight(weight), {.r = 4, .lora_alpha = 6}, 0, at::randn({40}));
  randomize(layer);
  const at::Tensor x = at::randn({3, 5, 24}).to(dtype).requires_grad_();
  const at::Tensor y = layer.forward(x);
  REQUIRE(y.sizes() == at::IntArrayRef({3, 5, 40}));
  REQUIRE(y.scalar_type() == dtype);
  const at::Tensor dy = at::randn_like(y);
  const auto found = torch::autograd::grad({y}, {x, layer.a(), layer.b()}, {dy});

  const auto expected = pass_of(layer, Quantizer().dequantize(weight, at::kFloat), 1.5, x.flatten(0, 1), dy.flatten(0, 1));
  REQUIRE(tiny::relative_error(found[0].flatten(0, 1), expected.dx) < tolerance);
  REQUIRE(tiny::relative_error(found[1], expected.da) < tolerance);
  REQUIRE(tiny::relative_error(found[2], expected.db) < tolerance);
}

TEST_CASE("LoraLinear begins as its base, scales by alpha / r or alpha / sqrt(r), and draws A as PEFT does", "[nn][cpu]") {
  const QuantizedTensor weight = make_weight(40, 24);
  const LoraLinear layer(FrozenWeight(weight), {.r = 16, .lora_alpha = 8}, 1);
  const at::Tensor x = at::randn({5, 24});
  REQUIRE(tiny::relative_error(layer.forward(x), at::matmul(x, Quantizer().dequantize(weight, at::kFloat).t())) < 1e-6);
  REQUIRE(layer.scaling() == 0.5);
  REQUIRE(LoraLinear(FrozenWeight(weight), {.r = 16, .lora_alpha = 8, .use_rslora = true}, 1).scaling() == 2.0);
  const double bound = 1.0 / std::sqrt(24.0);
  REQUIRE(layer.a().abs().max().item<double>() <= bound);
  REQUIRE(layer.a().abs().max().item<double>() > 0.95 * bound);
  REQUIRE_FALSE(at::equal(layer.a(), LoraLinear(FrozenWeight(weight), {.r = 16}, 2).a()));
}

TEST_CASE("LoraLinear's dropout drops the adapter's input only, in training only", "[nn][cpu]") {
  const QuantizedTensor weight = make_weight(64, 64);
  LoraLinear layer(FrozenWeight(weight), {.r = 4, .lora_alpha = 4, .lora_dropout = 0.5}, 0);
  const at::Tensor x = at::randn({256, 64});
  const at::Tensor base = at::matmul(x, Quantizer().dequantize(weight, at::kFloat).t());
  REQUIRE(tiny::relative_error(layer.forward(x, true), base) < 1e-6);  // B is zero: nothing to drop
  randomize(layer);
  REQUIRE_FALSE(at::equal(layer.forward(x, true), layer.forward(x, true)));
  at::Tensor mean = at::zeros_like(base);
  for (int i = 0; i < 200; ++i) mean += layer.forward(x, true).detach() / 200;
  const at::Tensor evaluated = layer.forward(x, false).detach();
  REQUIRE(at::equal(evaluated, layer.forward(x, false).detach()));
  REQUIRE(tiny::relative_error(mean, evaluated) < 0.15);  // its expectation is the layer without dropout
  // It has no mode of its own, which a module's eval() would not reach.
  REQUIRE_THROWS_WITH(layer.forward(x), Catch::Matchers::ContainsSubstring("forward(x, training)"));
}

TEST_CASE("merge adds the update and unmerge gives back the very codes", "[nn][cpu]") {
  const QuantizedTensor weight = make_weight(40, 24);
  const at::Tensor packed = weight.packed.clone(), absmax = weight.absmax.clone();
  LoraLinear layer(FrozenWeight(weight), {.r = 4}, 0);
  randomize(layer);
  const at::Tensor x = at::randn({5, 24});
  const at::Tensor before = layer.forward(x).detach();
  layer.merge();
  REQUIRE(tiny::relative_error(layer.forward(x), before) < 2e-6);
  REQUIRE_THROWS_AS(layer.merge(), ValueError);
  layer.unmerge();
  REQUIRE(at::equal(layer.base().quantized.packed, packed));
  REQUIRE(at::equal(layer.base().quantized.absmax, absmax));
  REQUIRE(at::equal(layer.forward(x), before));
  REQUIRE_THROWS_AS(layer.unmerge(), ValueError);
  layer.merge(LoraLinear::MergeInto::kFourBit);
  REQUIRE(tiny::relative_error(layer.forward(x), before) < 0.2);
  layer.unmerge();
  {
    const at::NoGradGuard no_grad;
    layer.b()[0][0] = std::numeric_limits<float>::quiet_NaN();
  }
  REQUIRE_THROWS_AS(layer.merge(), ValueError);
  REQUIRE_FALSE(layer.merged());
}

TEST_CASE("a checkpointed LoraLinear repeats its dropout mask", "[nn][cpu]") {
  LoraLinear layer(FrozenWeight(make_weight(24, 24)), {.r = 4, .lora_dropout = 0.5}, 0);
  randomize(layer);
  const at::Tensor x = at::randn({6, 24});
  at::manual_seed(9);
  const auto expected = torch::autograd::grad({layer.forward(x, true).pow(2).sum()}, layer.parameters());
  CheckpointedBlock<LoraLinear> checked(layer);
  at::manual_seed(9);
  const auto found = torch::autograd::grad({checked.forward(x, true).pow(2).sum()}, layer.parameters());
  REQUIRE(at::equal(found[0], expected[0]));
  REQUIRE(at::equal(found[1], expected[1]));
}

TEST_CASE("options outside their range name themselves", "[nn][cpu]") {
  const QuantizedTensor weight = make_weight(8, 8);
  REQUIRE_THROWS_AS(LoraLinear(FrozenWeight(weight), {.r = 0}, 0), ValueError);
  REQUIRE_THROWS_AS(LoraLinear(FrozenWeight(weight), {.lora_alpha = -1}, 0), ValueError);
  REQUIRE_THROWS_AS(LoraLinear(FrozenWeight(weight), {.lora_dropout = 1}, 0), ValueError);
  REQUIRE_THROWS_AS(LoraLinear(FrozenWeight(weight), LoraLinear::Options{}, 0).forward(at::randn({2, 9})), ValueError);
}

TEST_CASE("a layer is its own: base and bias are frozen, and converting it leaves the caller's tensors alone", "[nn][cpu]") {
  const at::Tensor weight = at::randn({6, 8}).requires_grad_(), bias = at::randn({6}).requires_grad_();
  LoraLinear layer(FrozenWeight(weight), {.r = 2}, 0, bias);
  const at::Tensor y = layer.forward(at::randn({3, 8}));
  torch::autograd::backward({y.sum()}, {});
  REQUIRE_FALSE(weight.grad().defined());
  REQUIRE_FALSE(bias.grad().defined());
  layer.to(at::kBFloat16);
  REQUIRE(layer.forward(at::randn({3, 8}).to(at::kBFloat16)).scalar_type() == at::kBFloat16);
  REQUIRE(layer.a().scalar_type() == at::kFloat);
  REQUIRE(weight.scalar_type() == at::kFloat);
  REQUIRE(bias.scalar_type() == at::kFloat);
}

TEST_CASE("with use_dora the output is scaled row by row to the magnitude, and gradients are those of the formula", "[nn][cpu]") {
  at::manual_seed(4);
  const at::Tensor weight = at::randn({12, 8}), x = at::randn({5, 8}).set_requires_grad(true), dy = at::randn({5, 12});
  LoraLinear layer{FrozenWeight(weight), {.r = 3, .lora_alpha = 6, .use_dora = true}, 9};
  CHECK(at::allclose(layer.forward(x), at::linear(x, weight), 1e-5, 1e-6));  // B is zero, so it begins as its base
  layer.b().detach().normal_(0, 0.3);
  layer.magnitude().detach().mul_(1.5);

  const auto expected = pass_of(layer, weight, 2, x, dy);
  const at::Tensor y = layer.forward(x);
  y.backward(dy);
  CHECK(tiny::relative_error(y.detach(), expected.y) < 2e-6);
  CHECK(tiny::relative_error(x.grad(), expected.dx) < 2e-6);
  CHECK(tiny::relative_error(layer.a().grad(), expected.da) < 2e-6);
  CHECK(tiny::relative_error(layer.b().grad(), expected.db) < 2e-6);
  CHECK(tiny::relative_error(layer.magnitude().grad().unsqueeze(0), expected.d_magnitude) < 2e-6);

  const at::Tensor before = layer.forward(x).detach();
  layer.merge();
  CHECK(at::allclose(layer.forward(x), before, 1e-4, 1e-5));
  layer.unmerge();
  CHECK(at::equal(layer.base().dense, weight));
}

TEST_CASE("a dense base is not merged into four bits", "[nn][cpu]") {
  LoraLinear layer{FrozenWeight(at::randn({12, 8})), {.r = 3}, 9};
  REQUIRE_THROWS_WITH(layer.merge(LoraLinear::MergeInto::kFourBit), Catch::Matchers::ContainsSubstring("this base is dense"));
  REQUIRE_FALSE(layer.merged());
}
