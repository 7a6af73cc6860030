// SPDX-License-Identifier: Apache-2.0
#include "ops/quantize.hpp"

#include <ATen/ATen.h>

#include <tuple>
#include <vector>

#include "catch.hpp"
#include "core/cpu_isa.hpp"
#include "reference/four_bit.hpp"
#include "with_isa.hpp"

using namespace qlorapp;
using tests::WithIsa;

namespace {

std::vector<float> to_vector(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.flatten().to(at::kFloat).contiguous();
  return {flat.const_data_ptr<float>(), flat.const_data_ptr<float>() + flat.numel()};
}

int code_at(const at::Tensor& packed, int64_t i) {
  const uint8_t byte = packed.const_data_ptr<uint8_t>()[i / 2];
  return i % 2 == 0 ? byte >> 4 : byte & 15;
}

/// Bits, so that a zero's sign and a NaN count.
bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         at::equal(a.contiguous().flatten().view(at::kByte), b.contiguous().flatten().view(at::kByte));
}

}  // namespace

TEST_CASE("codes are nearest in double precision wherever the choice is clear", "[ops][cpu]") {
  at::manual_seed(1);
  for (const auto dtype : {at::kFloat, at::kHalf, at::kBFloat16}) {
    for (const QuantType type : {QuantType::kNf4, QuantType::kFp4}) {
      const at::Tensor weight = (at::randn({37, 211}) * 0.05).to(dtype);
      const auto [packed, absmax] = ops::quantize_4bit(weight, 128, type);
      const auto& book = type == QuantType::kNf4 ? reference::kNf4 : reference::kFp4;
      const auto expected = reference::quantize(to_vector(weight), 128, book);
      int64_t unclear = 0;
      for (int64_t i = 0; i < weight.numel(); ++i) {
        const auto at = static_cast<size_t>(i);
        const auto code = static_cast<size_t>(code_at(packed, i));
        if (expected.margin[at] < 1e-6) ++unclear;
        else REQUIRE(book[code] == book[static_cast<size_t>(expected.codes[at])]);
      }
      REQUIRE(unclear < weight.numel() / 100);
      for (int64_t b = 0; b < absmax.numel(); ++b)
        REQUIRE(static_cast<double>(absmax[b].item<float>()) == expected.absmax[static_cast<size_t>(b)]);
    }
  }
}

TEST_CASE("a large result, written past the caches, equals its parts", "[ops][cpu]") {
  at::manual_seed(4);
  const at::Tensor weight = at::randn({2100, 2048});  // 17 MB in fp32
  const auto [packed, absmax] = ops::quantize_4bit(weight);
  for (const CpuIsa choice : {CpuIsa::kScalar, CpuIsa::kAvx2, CpuIsa::kAvx512}) {
    const WithIsa isa(choice);
    const at::Tensor whole = ops::dequantize_4bit(packed, absmax, {2100, 2048}, 64, QuantType::kNf4, at::kFloat);
    for (const int64_t row : {int64_t{0}, int64_t{1050}, int64_t{2099}}) {
      const at::Tensor part = ops::dequantize_4bit(packed.narrow(0, row * 1024, 1024), absmax.narrow(0, row * 32, 32), {2048}, 64,
                                                   QuantType::kNf4, at::kFloat);
      REQUIRE(same_bits(whole[row], part));
    }
    REQUIRE((whole - weight).abs().max().item<double>() < 0.16 * absmax.max().item<double>());
  }
}

TEST_CASE("the instruction set is never above what the processor has", "[ops][cpu]") {
  const WithIsa isa(CpuIsa::kAvx512Bf16);
  REQUIRE(cpu_isa() == best_cpu_isa());
}
