// SPDX-License-Identifier: Apache-2.0
#include "ops/norm.hpp"

#include "catch.hpp"
#include "qlorapp/core/error.hpp"
#include "tensors.hpp"

using namespace qlorapp;
using namespace tests;

TEST_CASE("rms_norm and its backward are the formulas in double precision", "[ops][cpu]") {
  at::manual_seed(1);
  const auto dtype = GENERATE(at::kDouble, at::kFloat, at::kBFloat16, at::kHalf);
  const int64_t rows = GENERATE(1, 3, 70), width = GENERATE(1, 7, 64, 515, 1537);
  const at::Tensor x = randn({rows, width}, dtype, 3.0), w = randn({width}, dtype), dy = randn({rows, width}, dtype);
  const auto want = reference::rms_norm(values(x), values(w), values(dy), 1e-5);
  const auto [y, rstd] = ops::rms_norm(x, w, 1e-5);
  REQUIRE(y.scalar_type() == dtype);
  REQUIRE(rstd.scalar_type() == (dtype == at::kDouble ? at::kDouble : at::kFloat));
  REQUIRE(relative_error(y, want.y) < tolerance(dtype));
  const at::Tensor dx = ops::rms_norm_backward(dy, x, w, rstd);
  if (width > 1) {  // with one element the gradient is nothing but cancellation
    REQUIRE(relative_error(dx, want.dx) < tolerance(dtype));
  }
  const at::Tensor residual = randn({rows, width}, dtype);
  at::Tensor both = residual.clone(), again = dy.clone();
  ops::rms_norm_backward_(both, again, x, w, rstd);
  REQUIRE(at::equal(both, residual + dx));
  REQUIRE(at::equal(again, y));
}

TEST_CASE("add_rms_norm is the addition, then the norm", "[ops][cpu]") {
  const auto dtype = GENERATE(at::kFloat, at::kBFloat16);
  const at::Tensor x = randn({9, 130}, dtype), residual = randn({9, 130}, dtype), w = randn({130}, dtype);
  const auto [sum, y, rstd] = ops::add_rms_norm(x, residual, w, 1e-6);
  REQUIRE(at::equal(sum, x + residual));
  const auto [alone, rstd_alone] = ops::rms_norm(sum, w, 1e-6);
  REQUIRE(at::equal(y, alone));
  REQUIRE(at::equal(rstd, rstd_alone));
}

TEST_CASE("rms_norm reads rows that lie apart and any leading dimensions", "[ops][cpu]") {
  const at::Tensor packed = randn({6, 5, 16}, at::kFloat), w = randn({16}, at::kFloat);
  const at::Tensor view = packed.narrow(1, 1, 3);
  const auto [y, rstd] = ops::rms_norm(view, w, 1e-5);
  const auto [want, want_rstd] = ops::rms_norm(view.contiguous(), w, 1e-5);
  REQUIRE(at::equal(y, want));
  REQUIRE(rstd.sizes() == at::IntArrayRef({6, 3}));
  REQUIRE(at::equal(std::get<0>(ops::rms_norm(packed.select(1, 2), w, 1e-5)),
                    std::get<0>(ops::rms_norm(packed.select(1, 2).contiguous(), w, 1e-5))));
  REQUIRE(std::get<0>(ops::rms_norm(at::empty({0, 16}), w, 1e-5)).numel() == 0);
}

TEST_CASE("rms_norm says what does not fit", "[ops][cpu]") {
  const at::Tensor x = randn({2, 8}, at::kFloat);
  REQUIRE_THROWS_AS(ops::rms_norm(x, randn({7}, at::kFloat), 1e-5), qlorapp::ValueError);
  REQUIRE_THROWS_AS(ops::rms_norm(x, randn({8}, at::kBFloat16), 1e-5), qlorapp::TypeError);
  REQUIRE_THROWS_AS(ops::rms_norm(x.to(at::kLong), x.to(at::kLong), 1e-5), qlorapp::TypeError);
  at::Tensor transposed = randn({8, 2}, at::kFloat).t(), dy = x.clone(), dx = x.clone();
  const at::Tensor w = randn({8}, at::kFloat);
  const at::Tensor rstd = std::get<1>(ops::rms_norm(x, w, 1e-5));
  REQUIRE_THROWS_AS(ops::rms_norm_backward_(transposed, dy, x, w, rstd), qlorapp::ValueError);
  REQUIRE_THROWS_AS(ops::rms_norm_backward_(dx, transposed, x, w, rstd), qlorapp::ValueError);
}
