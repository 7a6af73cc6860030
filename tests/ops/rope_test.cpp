// SPDX-License-Identifier: Apache-2.0
#include "ops/rope.hpp"

#include "catch.hpp"
#include "qlorapp/core/error.hpp"
#include "tensors.hpp"

using namespace qlorapp;
using namespace tests;

TEST_CASE("rope turns the halves of each head by the angle of its position", "[ops][cpu]") {
  at::manual_seed(2);
  const auto dtype = GENERATE(at::kDouble, at::kFloat, at::kBFloat16, at::kHalf);
  const int64_t heads = GENERATE(1, 3), d = GENERATE(2, 8, 16, 64, 128);
  const std::vector<int64_t> positions{0, 1, 2, 3, 0, 1, 20};
  const bool interleaved = GENERATE(false, true);
  const int64_t width = GENERATE_REF(from_range(d > 2 ? std::vector<int64_t>{d, d / 2} : std::vector<int64_t>{d}));
  const reference::Rotary rotary{width, interleaved};
  const at::Tensor angles = at::rand({21, width / 2}, at::kFloat) * 6.28, cos = angles.cos(), sin = angles.sin();
  const at::Tensor index = at::tensor(positions), x = randn({7, heads, d}, dtype);
  for (const bool inverse : {false, true}) {
    const auto want = reference::rope(values(x), heads, d, values(cos), values(sin), positions, inverse ? -1 : 1, rotary);
    const at::Tensor y = ops::rope(x, cos, sin, index, inverse, interleaved);
    REQUIRE(relative_error(y, want) < tolerance(dtype));
    at::Tensor in_place = x.clone();
    ops::rope_(in_place, cos, sin, index, inverse, interleaved);
    REQUIRE(at::equal(in_place, y));
  }
}

TEST_CASE("rope with empty tables turns nothing", "[ops][cpu]") {
  const at::Tensor x = randn({3, 2, 8}, at::kFloat), none = at::empty({4, 0});
  REQUIRE(at::equal(ops::rope(x, none, none, at::arange(3)), x));
}

TEST_CASE("rope_ turns q and k inside a packed projection and leaves v alone", "[ops][cpu]") {
  const int64_t heads = 4, kv_heads = 2, d = 16;
  const at::Tensor packed = randn({5, (heads + 2 * kv_heads) * d}, at::kFloat), before = packed.clone();
  const at::Tensor angles = at::rand({5, d / 2}) * 6.28, positions = at::arange(5);
  at::Tensor q_and_k = packed.view({5, heads + 2 * kv_heads, d}).narrow(1, 0, heads + kv_heads);
  ops::rope_(q_and_k, angles.cos(), angles.sin(), positions);
  const at::Tensor turned = before.narrow(1, 0, (heads + kv_heads) * d);
  REQUIRE(at::equal(q_and_k, ops::rope(turned.reshape({5, heads + kv_heads, d}), angles.cos(), angles.sin(), positions)));
  REQUIRE(
      at::equal(packed.narrow(1, (heads + kv_heads) * d, kv_heads * d), before.narrow(1, (heads + kv_heads) * d, kv_heads * d)));
}

TEST_CASE("rope refuses positions outside its tables and tables of another head", "[ops][cpu]") {
  const at::Tensor x = randn({2, 1, 8}, at::kFloat), table = at::zeros({4, 4});
  REQUIRE_THROWS_AS(ops::rope(x, table, table, at::tensor({0, 4}, at::kLong)), qlorapp::ValueError);
  REQUIRE_THROWS_AS(ops::rope(x, table, table, at::tensor({-1, 0}, at::kLong)), qlorapp::ValueError);
  const at::Tensor wide = at::zeros({4, 5});
  REQUIRE_THROWS_AS(ops::rope(x, wide, wide, at::tensor({0, 1}, at::kLong)), qlorapp::ValueError);
  const at::Tensor half = at::zeros({4, 2}), weight = at::ones({8});  // a part of a head turns; normed ones turn as a whole
  REQUIRE_THROWS_AS(ops::rms_norm_rope(x, weight, weight, 1, 1e-5, half, half, at::tensor({0, 1}, at::kLong)), qlorapp::ValueError);
}
