// SPDX-License-Identifier: Apache-2.0
#include "ops/attention.hpp"

#include "catch.hpp"
#include "qlorapp/core/error.hpp"
#include "tensors.hpp"

using namespace qlorapp;
using namespace tests;

namespace {

void compare(at::ScalarType dtype, int64_t heads, int64_t kv_heads, int64_t d, const std::vector<int64_t>& row_starts) {
  const int64_t tokens = row_starts.back();
  const double scale = 1 / std::sqrt(static_cast<double>(d));
  // As a decoder block has them: views of packed projections.
  const at::Tensor packed = randn({tokens, heads + 2 * kv_heads, d}, dtype);
  const at::Tensor q = packed.narrow(1, 0, heads), k = packed.narrow(1, heads, kv_heads),
                   v = packed.narrow(1, heads + kv_heads, kv_heads);
  const at::Tensor dout = randn({tokens, heads, d}, dtype);
  const auto want = reference::attention(values(q), values(k), values(v), values(dout), heads, kv_heads, d, row_starts, scale);

  const auto [out, lse] = ops::attention(q, k, v, row_starts, scale);
  REQUIRE(out.is_contiguous());
  REQUIRE(relative_error(out, want.out) < tolerance(dtype));
  REQUIRE(relative_error(lse, want.lse) < (dtype == at::kDouble ? 1e-13 : 1e-3));
  if (dtype == at::kFloat) REQUIRE(relative_error(lse, want.lse) < 1e-6);

  const auto [dq, dk, dv] = ops::attention_backward(dout, q, k, v, out, lse, row_starts, scale);
  const at::Tensor all = at::cat({dq.reshape(-1), dk.reshape(-1), dv.reshape(-1)});
  reference::Values want_all = want.dq;
  want_all.insert(want_all.end(), want.dk.begin(), want.dk.end());
  want_all.insert(want_all.end(), want.dv.begin(), want.dv.end());
  REQUIRE(relative_error(all, want_all) < 2 * tolerance(dtype));
  REQUIRE(relative_error(dv, want.dv) < 2 * tolerance(dtype));
}

}  // namespace

TEST_CASE("attention and its backward are the formulas for grouped heads and ragged rows", "[ops][cpu]") {
  at::manual_seed(4);
  const auto dtype = GENERATE(at::kDouble, at::kFloat, at::kBFloat16, at::kHalf);
  const int64_t kv_heads = GENERATE(1, 2, 4), d = GENERATE(8, 16, 64, 128);
  const auto row_starts = GENERATE(std::vector<int64_t>{0, 1}, std::vector<int64_t>{0, 37}, std::vector<int64_t>{0, 9, 18, 27},
                                   std::vector<int64_t>{0, 0, 1, 20, 20, 33});
  compare(dtype, 4, kv_heads, d, row_starts);
}

TEST_CASE("rows longer than a tile of the fused kernel", "[ops][cpu]") {
  at::manual_seed(5);
  compare(at::kFloat, 2, 1, 16, {0, 300, 517});
  compare(at::kBFloat16, 2, 2, 16, {0, 290, 580});
}

TEST_CASE("cached attention is the last queries of attention", "[ops][cpu]") {
  at::manual_seed(6);
  const std::vector<int64_t> starts{0, 90, 91, 231};
  const at::Tensor q = randn({231, 4, 16}, at::kFloat), k = randn({231, 2, 16}, at::kFloat), v = randn({231, 2, 16}, at::kFloat);
  const at::Tensor full = std::get<0>(ops::attention(q, k, v, starts, 0.25));
  const auto tail = [&](const at::Tensor& x) { return at::cat({x.slice(0, 20, 90), x.slice(0, 90, 91), x.slice(0, 229, 231)}); };
  const at::Tensor got = ops::attention_with_cache(tail(q), k, v, {0, 70, 71, 73}, {0, 90, 91}, {90, 1, 140}, 0.25);
  REQUIRE(relative_error(got, values(tail(full))) < 1e-6);
  REQUIRE_THROWS_AS(ops::attention_with_cache(tail(q), k, v, {0, 70, 71, 73}, {0, 90, 91}, {90, 1, 141}, 0.25),
                    qlorapp::ValueError);
  REQUIRE_THROWS_AS(ops::attention_with_cache(tail(q), k, v, {0, 70, 71, 73}, {0, 90, 91}, {69, 1, 140}, 0.25),
                    qlorapp::ValueError);
}

TEST_CASE("an empty batch has an empty result", "[ops][cpu]") {
  const at::Tensor q = at::empty({0, 4, 8}), k = at::empty({0, 2, 8});
  const auto [out, lse] = ops::attention(q, k, k, {0, 0}, 1.0);
  REQUIRE(out.sizes() == q.sizes());
  REQUIRE(lse.sizes() == at::IntArrayRef({4, 0}));
}
