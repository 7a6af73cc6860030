// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/quant/quantizer.hpp"

#include <ATen/ATen.h>

#include <cmath>
#include <limits>

#include "catch.hpp"
#include "core/check.hpp"
#include "quant/linear.hpp"

using namespace qlorapp;

TEST_CASE("a quantized tensor takes 4.127 bits an element and comes back near the weight", "[quant][cpu]") {
  at::manual_seed(1);
  const at::Tensor weight = at::randn({512, 1024}, at::kFloat).to(at::kBFloat16);
  const Quantizer quantizer;
  const QuantizedTensor q = quantizer.quantize(weight);
  q.check("weight");
  REQUIRE(q.numel() == 512 * 1024);
  REQUIRE(q.dtype == at::kBFloat16);
  REQUIRE(q.double_quantized());
  REQUIRE(q.nbytes().count == 512 * 1024 / 2 + 512 * 1024 / 64 + 512 * 1024 / 64 / 256 * 4 + 4);
  const at::Tensor back = quantizer.dequantize(q);
  REQUIRE(back.scalar_type() == at::kBFloat16);
  REQUIRE(back.sizes() == weight.sizes());
  // Mean errors of NF4 on normal data at block 64 (published with bitsandbytes' tests: 0.0728 ± 7 sigma, rounded up for
  // double quantization and bf16).
  REQUIRE((back.to(at::kFloat) - weight.to(at::kFloat)).abs().mean().item<double>() < 0.0740);
  REQUIRE((back.to(at::kFloat) - weight.to(at::kFloat)).abs().mean().item<double>() > 0.0715);
}

TEST_CASE("double quantization stores the scales' distance from their mean, nearest in eight bits", "[quant][cpu]") {
  at::manual_seed(2);
  const at::Tensor weight = at::randn({300, 100});
  Quantizer::Options plain;
  plain.double_quant = false;
  const QuantizedTensor once = Quantizer(plain).quantize(weight);
  const QuantizedTensor twice = Quantizer().quantize(weight);
  REQUIRE(at::equal(once.packed, twice.packed));
  REQUIRE(once.absmax.scalar_type() == at::kFloat);
  REQUIRE_FALSE(once.double_quantized());
  REQUIRE(at::equal(twice.nested_offset, at::mean(once.absmax)));
  const at::Tensor centered = (once.absmax - twice.nested_offset).to(at::kDouble);
  REQUIRE(twice.nested_absmax.numel() == 2);
  REQUIRE(twice.nested_absmax[1].item<float>() ==
          centered.narrow(0, 256, centered.numel() - 256).abs().max().to(at::kFloat).item<float>());
  const double range = centered.abs().max().item<double>();
  const at::Tensor scales = Quantizer().dequantize(twice).abs().flatten().narrow(0, 0, 64).max();
  REQUIRE(std::fabs(scales.item<double>() - once.absmax[0].item<double>()) < range / 64);
}

TEST_CASE("like() makes tensors of the same kind, and requantizing dequantized values restores the codes", "[quant][cpu]") {
  at::manual_seed(3);
  Quantizer::Options options;
  options.quant_type = QuantType::kFp4;
  options.block_size = 128;
  options.double_quant = false;
  const QuantizedTensor q = Quantizer(options).quantize(at::randn({64, 128}));
  const Quantizer same = Quantizer::like(q);
  REQUIRE(same.options().quant_type == QuantType::kFp4);
  REQUIRE(same.options().block_size == 128);
  REQUIRE_FALSE(same.options().double_quant);
  const QuantizedTensor again = same.quantize(same.dequantize(q));
  REQUIRE(at::equal(again.absmax, q.absmax));
  REQUIRE(at::equal(same.dequantize(again), same.dequantize(q)));
}

TEST_CASE("zero blocks, empty weights and scalars survive the round trip", "[quant][cpu]") {
  const Quantizer quantizer;
  REQUIRE(quantizer.dequantize(quantizer.quantize(at::zeros({7, 33}))).abs().max().item<float>() == 0.0F);
  Quantizer::Options plain;
  plain.double_quant = false;
  REQUIRE(Quantizer(plain).quantize(at::zeros({7, 33})).absmax.count_nonzero().item<int64_t>() == 0);  // of the short block, too
  REQUIRE(quantizer.dequantize(quantizer.quantize(at::empty({0, 33}))).sizes() == at::IntArrayRef({0, 33}));
  REQUIRE(quantizer.dequantize(quantizer.quantize(at::scalar_tensor(2.5F))).item<float>() == 2.5F);
}

TEST_CASE("the default refuses what is not finite, compat follows bitsandbytes", "[quant][cpu]") {
  at::Tensor weight = at::ones({4, 64});
  weight[2][5] = std::numeric_limits<float>::quiet_NaN();
  REQUIRE_THROWS_AS(Quantizer().quantize(weight), ValueError);
  Quantizer::Options options;
  options.compat = Compat::kBnb;
  options.double_quant = false;
  const QuantizedTensor q = Quantizer(options).quantize(weight);
  REQUIRE(std::isnan(q.absmax[2].item<float>()));
  REQUIRE(at::equal(q.packed.flatten().narrow(0, 64, 32), at::full({32}, 0xFF, at::kByte)));
  REQUIRE(q.absmax[1].item<float>() == 1.0F);
}

TEST_CASE("options outside their range are refused by name", "[quant][cpu]") {
  Quantizer::Options options;
  options.block_size = 100;
  REQUIRE_THROWS_AS(Quantizer(options), ValueError);
  options.block_size = 64;
  options.nested_block_size = 0;
  REQUIRE_THROWS_AS(Quantizer(options), ValueError);
}

TEST_CASE("check() finds every part that contradicts the shape", "[quant][cpu]") {
  const QuantizedTensor good = Quantizer().quantize(at::randn({33, 77}));
  REQUIRE_NOTHROW(good.check("w"));
  const auto broken = [&](auto&& change) {
    QuantizedTensor bad = good;
    change(bad);
    REQUIRE_THROWS_AS(bad.check("w"), ValueError);
  };
  broken([](QuantizedTensor& q) { q.packed = q.packed.narrow(0, 0, q.packed.numel() - 1); });
  broken([](QuantizedTensor& q) { q.packed = q.packed.to(at::kInt); });
  broken([](QuantizedTensor& q) { q.packed = at::Tensor(); });
  broken([](QuantizedTensor& q) { q.absmax = q.absmax.to(at::kFloat); });
  broken([](QuantizedTensor& q) { q.absmax = at::cat({q.absmax, q.absmax}); });
  broken([](QuantizedTensor& q) { q.nested_absmax = at::ones({2}); });
  broken([](QuantizedTensor& q) { q.nested_offset = at::Tensor(); });
  broken([](QuantizedTensor& q) { q.nested_offset = at::ones({2}); });
  broken([](QuantizedTensor& q) { q.nested_block_size = -1; });
  broken([](QuantizedTensor& q) { q.block_size = 65; });
  broken([](QuantizedTensor& q) { q.shape = {33, 78}; });
  broken([](QuantizedTensor& q) { q.shape = {-33, -77}; });
  broken([](QuantizedTensor& q) { q.shape = {int64_t{1} << 40, int64_t{1} << 40}; });
  broken([](QuantizedTensor& q) { q.dtype = at::kDouble; });
}

TEST_CASE("moving to the device where it is copies nothing", "[quant][cpu]") {
  const QuantizedTensor q = Quantizer().quantize(at::randn({8, 64}));
  REQUIRE(q.to(at::kCPU).packed.is_same(q.packed));
  REQUIRE(q.to(at::kMeta).packed.is_meta());
}

TEST_CASE("the linear product of a QuantizedTensor equals that of its values, allocating or not", "[quant][cpu]") {
  at::manual_seed(4);
  for (const bool double_quant : {false, true}) {
    Quantizer::Options options;
    options.double_quant = double_quant;
    const Quantizer quantizer(options);
    const QuantizedTensor q = quantizer.quantize(at::randn({96, 352}));
    const at::Tensor dense = quantizer.dequantize(q, at::kDouble);
    const at::Tensor x = at::randn({3, 4, 352}, at::kDouble);
    REQUIRE(at::allclose(linear_4bit(x, q), at::matmul(x, dense.t()), 1e-12, 1e-12));
    const at::Tensor g = at::randn({12, 96}, at::kDouble);
    REQUIRE(at::allclose(linear_4bit(g, q, true), at::mm(g, dense), 1e-12, 1e-12));
    at::Tensor y = at::ones({12, 352}, at::kDouble);
    linear_4bit_out(y, g, q, true, true);
    REQUIRE(at::allclose(y, at::mm(g, dense) + 1, 1e-12, 1e-12));
  }
}
