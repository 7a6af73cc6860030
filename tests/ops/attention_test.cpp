// SPDX-License-Identifier: Apache-2.0
#include "ops/attention.hpp"

#include <ATen/Parallel.h>

#include <algorithm>

#include "catch.hpp"
#include "qlorapp/core/error.hpp"
#include "tensors.hpp"
#include "with_isa.hpp"

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

TEST_CASE("one query for each row of a cache is its formula in double precision", "[ops][cpu]") {
  at::manual_seed(7);
  const auto dtype = GENERATE(at::kDouble, at::kFloat, at::kBFloat16, at::kHalf);
  const int64_t kv_heads = GENERATE(1, 3, 6), d = GENERATE(8, 20, 64, 80), window = GENERATE(0, 1, 100);
  const WithIsa isa(GENERATE(CpuIsa::kScalar, CpuIsa::kAvx2, CpuIsa::kAvx512));
  const std::vector<int64_t> starts{5, 700, 40}, lengths{1, 513, 130}, row_starts{0, 1, 2, 3};
  const at::Tensor whole = randn({3, 6 + 2 * kv_heads, d}, dtype), q = whole.narrow(1, kv_heads, 6);
  const at::Tensor k = randn({1300, kv_heads, d}, dtype), v = randn({1300, kv_heads, d}, dtype);
  const auto device = [](const std::vector<int64_t>& list) { return at::tensor(list, at::kLong); };
  const at::Tensor got = ops::attention_with_cache(q, k, v, row_starts, starts, lengths, 0.3, window);
  REQUIRE(at::equal(ops::decode_attention(q, k, v, device(starts), device(lengths), 600, 0.3, window), got));
  for (int64_t row = 0; row < 3; ++row) {
    const auto at = static_cast<size_t>(row);
    const int64_t seen = window > 0 ? std::min(window, lengths[at]) : lengths[at], first = starts[at] + lengths[at] - seen;
    const auto of_heads = [&](const at::Tensor& x) {
      return x.narrow(0, first, seen).to(at::kDouble).repeat_interleave(6 / kv_heads, 1).transpose(0, 1);
    };
    const at::Tensor scores = at::matmul(of_heads(k), q[row].to(at::kDouble).unsqueeze(2)).squeeze(2) * 0.3;
    const at::Tensor want = at::matmul(scores.softmax(1).unsqueeze(1), of_heads(v)).squeeze(1);
    REQUIRE(relative_error(got[row], values(want)) < 2 * tolerance(dtype));
    // The same bits alone, and however heads are shared among threads.
    const int threads = at::get_num_threads();
    at::set_num_threads(threads > 1 ? 1 : 8);
    const at::Tensor alone = ops::attention_with_cache(q.narrow(0, row, 1), k, v, {0, 1}, {starts[at]}, {lengths[at]}, 0.3, window);
    at::set_num_threads(threads);
    REQUIRE(at::equal(alone[0], got[row]));
  }
}

TEST_CASE("keys that rows share are read where they are", "[ops][cpu]") {
  at::manual_seed(9);
  const auto dtype = GENERATE(at::kDouble, at::kFloat, at::kBFloat16);
  const int64_t window = GENERATE(0, 1, 30, 60), last = GENERATE(1, 5);
  // Rows of 50, 70 and 33 keys; the second begins with 40 of the first, the third shares nothing.
  const at::Tensor own = randn({153, 2, 2, 16}, dtype), q = randn({last * 3, 4, 16}, dtype);
  own.narrow(0, 50, 40).copy_(own.narrow(0, 0, 40));
  const at::Tensor moved = at::cat({own.narrow(0, 90, 30), own.narrow(0, 0, 50), own.narrow(0, 120, 33)});
  const std::vector<int64_t> row_starts{0, last, 2 * last, 3 * last}, lengths{50, 70, 33};
  const auto keys = [](const at::Tensor& both) { return both.select(1, 0); };
  const auto values_of = [](const at::Tensor& both) { return both.select(1, 1); };
  const at::Tensor want = ops::attention_with_cache(q, keys(own), values_of(own), row_starts, {0, 50, 120}, lengths, 0.3, window);
  const std::vector<int64_t> starts{30, 0 - 40, 80}, shared_starts{0, 30, 0}, shared{0, 40, 0};
  REQUIRE(at::equal(
      ops::attention_with_cache(q, keys(moved), values_of(moved), row_starts, starts, lengths, 0.3, window, shared_starts, shared),
      want));
  if (last > 1) return;
  const auto device = [](const std::vector<int64_t>& list) { return at::tensor(list, at::kLong); };
  REQUIRE(at::equal(ops::decode_attention(q, keys(moved), values_of(moved), device(starts), device(lengths), 70, 0.3, window,
                                          device(shared_starts), device(shared)),
                    want));
  const auto refuses = [&](const std::vector<int64_t>& first, const std::vector<int64_t>& begin,
                           const std::vector<int64_t>& count) {
    REQUIRE_THROWS_AS(
        ops::attention_with_cache(q, keys(moved), values_of(moved), row_starts, first, lengths, 0.3, window, begin, count),
        qlorapp::ValueError);
  };
  refuses({30, 1, 80}, shared_starts, {0, -1, 0});
  refuses(starts, {0, 114, 0}, shared);
  refuses(starts, {0, -1, 0}, shared);
  refuses({30, -41, 80}, shared_starts, shared);
  refuses(starts, shared_starts, {0, 70, 0});
  refuses(starts, {0, 30}, {0, 40});
  REQUIRE_THROWS_AS(ops::decode_attention(q, keys(moved), values_of(moved), device(starts), device(lengths), 70, 0.3, window,
                                          device(shared_starts)),
                    qlorapp::ValueError);
}

TEST_CASE("an empty batch has an empty result", "[ops][cpu]") {
  const at::Tensor q = at::empty({0, 4, 8}), k = at::empty({0, 2, 8});
  const auto [out, lse] = ops::attention(q, k, k, {0, 0}, 1.0);
  REQUIRE(out.sizes() == q.sizes());
  REQUIRE(lse.sizes() == at::IntArrayRef({4, 0}));
}
