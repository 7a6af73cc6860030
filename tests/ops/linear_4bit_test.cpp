// SPDX-License-Identifier: Apache-2.0
#include "ops/linear.hpp"

#include <ATen/ATen.h>

#include "catch.hpp"
#include "core/cpu_isa.hpp"
#include "ops/quantize.hpp"

using namespace qlorapp;

TEST_CASE("panels of a weight whose rows cut its blocks give the whole product, both ways and in every dtype", "[ops][cpu]") {
  at::manual_seed(5);
  // Rows of 353 elements begin inside blocks and inside bytes; 6,000 of them make several panels in fp32.
  for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{6000, 353}, {65, 127}, {128, 2048}}) {
    const auto [packed, absmax] = ops::quantize_4bit(at::randn({rows, columns}) * 0.1);
    for (const CpuIsa choice : {CpuIsa::kScalar, CpuIsa::kAvx2, CpuIsa::kAvx512}) {
      set_cpu_isa(choice);
      for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
        const at::Tensor dense = ops::dequantize_4bit(packed, absmax, {rows, columns}, 64, QuantType::kNf4, dtype).to(at::kDouble);
        for (const bool transpose : {false, true}) {
          const at::Tensor x = at::randn({5, transpose ? rows : columns}).to(dtype);
          const at::Tensor y =
              ops::linear_4bit(x, packed, absmax, std::nullopt, std::nullopt, {rows, columns}, 64, 256, QuantType::kNf4, transpose);
          const at::Tensor expected = at::mm(x.to(at::kDouble), transpose ? dense : dense.t());
          const double limit = dtype == at::kDouble ? 1e-13 : dtype == at::kFloat ? 2e-6 : dtype == at::kHalf ? 1e-3 : 8e-3;
          REQUIRE(((y.to(at::kDouble) - expected).norm() / expected.norm()).item<double>() < limit);
          REQUIRE(y.scalar_type() == dtype);
        }
      }
    }
    set_cpu_isa(best_cpu_isa());
  }
}
