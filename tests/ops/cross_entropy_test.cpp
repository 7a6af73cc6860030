// SPDX-License-Identifier: Apache-2.0
#include "ops/cross_entropy.hpp"

#include <torch/csrc/autograd/autograd.h>

#include "catch.hpp"
#include "qlorapp/core/error.hpp"
#include "tensors.hpp"

using namespace qlorapp;
using namespace tests;

TEST_CASE("linear_cross_entropy and its gradient are the formulas in double precision", "[ops][cpu]") {
  at::manual_seed(7);
  const auto dtype = GENERATE(at::kDouble, at::kFloat, at::kBFloat16, at::kHalf);
  const int64_t rows = GENERATE(1, 19), width = GENERATE(5, 64), vocabulary = GENERATE(1, 301);
  const int64_t chunk = GENERATE(1, 4, 512);
  const at::Tensor hidden = randn({rows, width}, dtype), weight = randn({vocabulary, width}, dtype, 0.2);
  at::Tensor targets = at::randint(vocabulary, {rows}, at::kLong);
  for (int64_t r = 2; r < rows; r += 3) targets[r] = -100;
  const std::vector<int64_t> labels(targets.const_data_ptr<int64_t>(), targets.const_data_ptr<int64_t>() + rows);
  const auto want = reference::linear_cross_entropy(values(hidden), values(weight), labels, width);
  const auto [loss, gradient] = ops::linear_cross_entropy(hidden, weight, targets, std::nullopt, true, chunk);
  REQUIRE(std::abs(loss.item<double>() - want.loss) <= tolerance(dtype) * std::max(1.0, want.loss));
  REQUIRE(relative_error(gradient, want.d_hidden) < 2 * tolerance(dtype));
  // A power of two as the scale moves exponents only.
  if (dtype != at::kHalf) {
    const auto [same, scaled] = ops::linear_cross_entropy(hidden, weight, targets, at::full({}, 64.0), true, chunk);
    REQUIRE(at::equal(same, loss));
    REQUIRE(at::equal(scaled, gradient * 64));
  }
}

TEST_CASE("statistics are the entropies of the rows and the targets that are the first highest logit", "[ops][cpu]") {
  at::manual_seed(5);
  const auto dtype = GENERATE(at::kDouble, at::kFloat, at::kBFloat16, at::kHalf);
  const int64_t rows = 40, vocabulary = GENERATE(1, 37, 301), chunk = GENERATE(3, 512);
  const double factor = GENERATE(1.0, 0.25), cap = GENERATE(0.0, 3.0);
  const bool gradient = GENERATE(false, true);
  // Half units: many rows have their highest logit twice. The head is the identity, so that logits are exact.
  const at::Tensor logits = (at::randn({rows, vocabulary}) * 4).round() / 2;
  at::Tensor targets = at::randint(vocabulary, {rows}, at::kLong);
  targets.slice(0, 0, 20) = logits.slice(0, 0, 20).argmax(1);
  for (int64_t r = 20; r < 30; ++r) targets[r] = vocabulary - 1 - logits[r].flip(0).argmax().item<int64_t>();  // the last highest
  for (int64_t r = 1; r < rows; r += 4) targets[r] = -100;

  at::Tensor shaped = logits.to(at::kDouble) * factor;
  if (cap != 0) shaped = (shaped / cap).tanh() * cap;
  const at::Tensor kept = targets.ge(0), log_p = shaped.log_softmax(1);
  const double entropy = -((log_p.exp() * log_p).sum(1) * kept).sum().item<double>();
  const auto correct = logits.argmax(1).eq(targets).sum().item<double>();

  const at::Tensor statistics = at::full({2}, 7.0, at::kFloat);  // added to
  const at::Tensor head = at::eye(vocabulary, at::TensorOptions().dtype(dtype));
  const auto with =
      ops::linear_cross_entropy(logits.to(dtype), head, targets, std::nullopt, gradient, chunk, -1, {factor, cap}, statistics);
  REQUIRE(std::abs(statistics[0].item<double>() - 7 - entropy) <= 1e-5 * std::max(1.0, entropy));
  REQUIRE(statistics[1].item<double>() - 7 == correct);
  const auto without = ops::linear_cross_entropy(logits.to(dtype), head, targets, std::nullopt, gradient, chunk, -1, {factor, cap});
  REQUIRE((at::equal(std::get<0>(with), std::get<0>(without)) && at::equal(std::get<1>(with), std::get<1>(without))));
  for (const at::Tensor& wrong : {at::zeros({3}), at::zeros({2}, at::kDouble)}) {
    REQUIRE_THROWS_WITH(ops::linear_cross_entropy(logits.to(dtype), head, targets, std::nullopt, gradient, chunk, -1, {}, wrong),
                        Catch::Matchers::ContainsSubstring("statistics must be float32 (2)"));
  }
}

TEST_CASE("ignored rows get a zero gradient, and a batch without targets a zero loss", "[ops][cpu]") {
  const at::Tensor hidden = randn({4, 8}, at::kFloat), weight = randn({11, 8}, at::kFloat);
  const auto [loss, gradient] = ops::linear_cross_entropy(hidden, weight, at::tensor({-1, 3, -100, 10}, at::kLong));
  REQUIRE(at::count_nonzero(gradient.select(0, 0)).item<int64_t>() == 0);
  REQUIRE(at::count_nonzero(gradient.select(0, 1)).item<int64_t>() == 8);
  const auto [none, zeros] = ops::linear_cross_entropy(hidden, weight, at::full({4}, -100, at::kLong));
  REQUIRE(none.item<double>() == 0.0);
  REQUIRE(at::equal(zeros, at::zeros_like(hidden)));
}

TEST_CASE("logits far apart neither overflow nor lose the loss", "[ops][cpu]") {
  const at::Tensor hidden = at::full({1, 1}, 1.0, at::kFloat), weight = at::tensor({-3000.0f, 0.0f, 2990.0f, 3000.0f}).view({4, 1});
  REQUIRE(std::abs(std::get<0>(ops::linear_cross_entropy(hidden, weight, at::tensor({2}, at::kLong))).item<double>() -
                   (10.0 + std::log1p(std::exp(-10.0)))) < 1e-6);
  const at::Tensor broken = at::full({1, 1}, NAN, at::kFloat);
  REQUIRE(std::isnan(std::get<0>(ops::linear_cross_entropy(broken, weight, at::tensor({2}, at::kLong))).item<double>()));
}

TEST_CASE("a target outside the vocabulary is named with its index", "[ops][cpu]") {
  const at::Tensor hidden = randn({2, 8}, at::kFloat), weight = randn({11, 8}, at::kFloat);
  try {
    ops::linear_cross_entropy(hidden, weight, at::tensor({0, 11}, at::kLong));
    FAIL("did not throw");
  } catch (const qlorapp::ValueError& error) {
    REQUIRE_THAT(error.what(), Catch::Matchers::ContainsSubstring("vocabulary size 11") &&
                                   Catch::Matchers::ContainsSubstring("got 11 at index 1"));
  }
}

TEST_CASE("a second derivative of linear_cross_entropy is refused with the library's Error", "[ops][cpu]") {
  const at::Tensor hidden = randn({2, 8}, at::kFloat).requires_grad_(), weight = randn({11, 8}, at::kFloat);
  const at::Tensor loss = std::get<0>(ops::linear_cross_entropy(hidden, weight, at::tensor({0, 10}, at::kLong)));
  REQUIRE_THROWS_AS(torch::autograd::grad({loss}, {hidden}, {}, true, /*create_graph=*/true), qlorapp::Error);
}
