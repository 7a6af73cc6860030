// SPDX-License-Identifier: Apache-2.0
#include "ops/gated_activation.hpp"

#include "catch.hpp"
#include "qlorapp/core/error.hpp"
#include "tensors.hpp"

using namespace qlorapp;
using namespace tests;

TEST_CASE("gated_activation and its backward are the formulas in double precision", "[ops][cpu]") {
  at::manual_seed(3);
  const auto dtype = GENERATE(at::kDouble, at::kFloat, at::kBFloat16, at::kHalf);
  const int64_t rows = GENERATE(1, 5, 33), n = GENERATE(1, 17, 64, 1001);
  const at::Tensor gate_up = randn({rows, 2 * n}, dtype, 3.0), dh = randn({rows, n}, dtype);
  const auto want = reference::gated_activation(values(gate_up), values(dh), n);
  const at::Tensor h = ops::gated_activation(gate_up), gradient = ops::gated_activation_backward(dh, gate_up);
  REQUIRE(relative_error(h, want.h) < tolerance(dtype));
  REQUIRE(relative_error(gradient, want.d_gate_up) < 2 * tolerance(dtype));
  at::Tensor both = gate_up.clone(), d = dh.clone();
  ops::gated_activation_backward_(d, both);
  REQUIRE(at::equal(both, gradient));
  REQUIRE(at::equal(d, h));
}

TEST_CASE("gated_activation's exponential is within 2 ulp over the whole range of float", "[ops][cpu]") {
  // silu(g) = g / (1 + e^-g): for g far below 0 its relative error is that of the exponential.
  const at::Tensor gate = at::linspace(-87.0, 20.0, 100'003, at::kFloat);
  const at::Tensor h = ops::gated_activation(at::stack({gate, at::ones_like(gate)}, 1));
  const at::Tensor wide = gate.to(at::kDouble), want = (wide / (1 + (-wide).exp())).unsqueeze(1);
  const double worst = ((h.to(at::kDouble) - want).abs() / want.abs().clamp_min(1e-37)).max().item<double>();
  REQUIRE(worst < 4 * 0x1p-24);
}

TEST_CASE("gated_activation reads a projection whose rows lie apart", "[ops][cpu]") {
  const at::Tensor packed = randn({4, 50}, at::kBFloat16), view = packed.narrow(1, 3, 40);
  REQUIRE(at::equal(ops::gated_activation(view), ops::gated_activation(view.contiguous())));
  REQUIRE_THROWS_AS(ops::gated_activation(packed.narrow(1, 0, 41)), qlorapp::ValueError);
  REQUIRE_THROWS_AS(ops::gated_activation_backward(packed, packed), qlorapp::ValueError);
}
