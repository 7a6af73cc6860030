// SPDX-License-Identifier: Apache-2.0
#include "ops/quantize.hpp"

#include <ATen/ATen.h>

#include <limits>
#include <tuple>
#include <vector>

#include "catch.hpp"
#include "core/cpu_isa.hpp"
#include "reference/four_bit.hpp"

using namespace qlorapp;

namespace {

/// Runs with at most the given instruction set, and gives back what was chosen before.
class WithIsa {
 public:
  explicit WithIsa(CpuIsa isa) : before_(cpu_isa()) { set_cpu_isa(isa); }
  ~WithIsa() { set_cpu_isa(before_); }
  WithIsa(const WithIsa&) = delete;
  WithIsa& operator=(const WithIsa&) = delete;

 private:
  CpuIsa before_;
};

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

TEST_CASE("scalar, AVX2 and AVX-512 quantize to the same bits", "[ops][cpu]") {
  at::manual_seed(2);
  for (const auto dtype : {at::kFloat, at::kHalf, at::kBFloat16}) {
    for (const QuantType type : {QuantType::kNf4, QuantType::kFp4}) {
      for (const int64_t block : {32, 64, 4096}) {
        for (const int64_t n : {int64_t{1}, int64_t{31}, 3 * block + 17, int64_t{20000}}) {
          at::Tensor weight = (at::randn({n}) * at::randn({n}).exp()).to(dtype);
          weight.index_put_({at::randint(n, {n / 8 + 1}, at::kLong)}, at::zeros({}, weight.options()));
          const auto [scalar, scalar_absmax] = [&] {
            const WithIsa isa(CpuIsa::kScalar);
            return ops::quantize_4bit(weight, block, type);
          }();
          for (const CpuIsa other : {CpuIsa::kAvx2, CpuIsa::kAvx512}) {
            const WithIsa isa(other);
            const auto [packed, absmax] = ops::quantize_4bit(weight, block, type);
            REQUIRE(same_bits(packed, scalar));
            REQUIRE(same_bits(absmax, scalar_absmax));
          }
        }
      }
    }
  }
}

TEST_CASE("a midpoint is quantized to the entry below it, in full and short blocks and in every instruction set", "[ops][cpu]") {
  for (const QuantType type : {QuantType::kNf4, QuantType::kFp4}) {
    std::vector<float> values{1.0F};  // absmax, so that the quotients are the values
    for (const float midpoint : code_thresholds_of(type)) values.push_back(midpoint);
    values.resize(32, -0.0F);
    for (const int64_t n : {32, 16}) {
      const at::Tensor weight = at::tensor(at::ArrayRef<float>(values.data(), static_cast<size_t>(n)));
      for (const CpuIsa choice : {CpuIsa::kScalar, CpuIsa::kAvx2, CpuIsa::kAvx512}) {
        const WithIsa isa(choice);
        const at::Tensor packed = std::get<0>(ops::quantize_4bit(weight, 32, type));
        for (int k = 0; k < 15; ++k) REQUIRE(code_at(packed, k + 1) == code_order_of(type)[static_cast<size_t>(k)]);
      }
    }
  }
}

TEST_CASE("scalar, AVX2 and AVX-512 give every code at every scale the same bits, NaN and infinity included", "[ops][cpu]") {
  // 256 bytes hold every pair of codes; a block of 32 takes 16 of them.
  const at::Tensor all = at::arange(256, at::kByte);
  std::vector<float> scales{0.0F,
                            1.0F,
                            -1.0F,
                            0.0371F,
                            1e-38F,
                            1e-45F,
                            1e-30F,
                            3.4e38F,
                            65504.0F,
                            65520.0F,
                            7e-8F,
                            5.9e-8F,
                            1.2e-5F,
                            3.1e-5F,
                            std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::quiet_NaN()};
  at::manual_seed(3);
  const at::Tensor random = at::randn({2000}).exp();
  for (int64_t i = 0; i < random.numel(); ++i) scales.push_back(random[i].item<float>());
  const auto blocks = static_cast<int64_t>(scales.size());
  const at::Tensor absmax = at::tensor(at::ArrayRef<float>(scales), at::TensorOptions().dtype(at::kFloat));
  const at::Tensor packed = all.repeat({blocks / 16 + 1}).narrow(0, 0, blocks * 16).contiguous();
  for (const QuantType type : {QuantType::kNf4, QuantType::kFp4}) {
    for (const auto dtype : {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble}) {
      const auto values = [&](CpuIsa choice) {
        const WithIsa isa(choice);
        return ops::dequantize_4bit(packed, absmax, {blocks, 32}, 32, type, dtype);
      };
      const at::Tensor scalar = values(CpuIsa::kScalar);
      REQUIRE(same_bits(values(CpuIsa::kAvx2), scalar));
      REQUIRE(same_bits(values(CpuIsa::kAvx512), scalar));
      // at's own conversion of the fp32 product is the rule.
      const at::Tensor codes = at::stack({packed.bitwise_right_shift(4), packed.bitwise_and(15)}, 1).flatten().to(at::kLong);
      const auto& book = type == QuantType::kNf4 ? reference::kNf4 : reference::kFp4;
      const at::Tensor table =
          at::tensor(at::ArrayRef<double>(book.data(), 16), at::TensorOptions().dtype(at::kDouble)).to(at::kFloat);
      const at::Tensor expected = (table.index({codes}).view({blocks, 32}) * absmax.unsqueeze(1)).to(dtype);
      REQUIRE(at::equal(scalar.isnan(), expected.isnan()));
      REQUIRE(at::equal(scalar.nan_to_num(0.0), expected.nan_to_num(0.0)));
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
  const WithIsa isa(CpuIsa::kAvx512);
  REQUIRE(cpu_isa() == best_cpu_isa());
}
