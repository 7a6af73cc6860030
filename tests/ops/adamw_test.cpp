// SPDX-License-Identifier: Apache-2.0
#include "ops/adamw.hpp"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "catch.hpp"
#include "format/dynamic_map.hpp"
#include "qlorapp/core/error.hpp"
#include "reference/adamw_8bit_reference.hpp"

using namespace qlorapp;

namespace {

struct Options {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
};

struct Arena {
  explicit Arena(int64_t n)
      : parameter(at::randn({n})),
        state1(at::full({n}, int{ops::kAdamW8bitZeroState1}, at::kByte)),
        state2(at::full({n}, int{ops::kAdamW8bitZeroState2}, at::kByte)),
        absmax1(at::zeros({ops::adamw_8bit_blocks(n)})),
        absmax2(at::zeros({ops::adamw_8bit_blocks(n)})) {}

  void step(const at::Tensor& gradient, int64_t t, const Options& options) {
    ops::adamw_8bit_(parameter, gradient, state1, state2, absmax1, absmax2, t, options.lr, options.beta1, options.beta2,
                     options.eps, options.weight_decay);
  }

  at::Tensor parameter, state1, state2, absmax1, absmax2;
};

template <class To, class From>
std::vector<To> copied(const at::Tensor& tensor) {
  const From* data = tensor.const_data_ptr<From>();
  return {data, data + tensor.numel()};
}

/// Gradients whose sizes differ from block to block and within one, as those of an adapter do.
at::Tensor gradient_like(int64_t n) { return at::randn({n}) * at::exp(at::randn({n}) * 2 - 5); }

}  // namespace

TEST_CASE("eight-bit AdamW stores the codes that a double-precision oracle stores, in full and short blocks", "[ops][cpu]") {
  at::manual_seed(1);
  const auto map1 = signed_dynamic_map();
  const auto map2 = unsigned_dynamic_map();
  const Options options{.lr = 1e-3, .weight_decay = 0.01};
  int64_t total = 0, different = 0;
  for (const int64_t n : {1, 255, 256, 257, 4096, 8191}) {
    Arena arena(n);
    for (int64_t t = 1; t <= 20; ++t) {
      // One step from the same state: rounding differences must not add up on the oracle's side.
      reference::Adam8bitState oracle{copied<double, float>(arena.parameter), copied<uint8_t, uint8_t>(arena.state1),
                                      copied<uint8_t, uint8_t>(arena.state2), copied<double, float>(arena.absmax1),
                                      copied<double, float>(arena.absmax2)};
      const at::Tensor gradient = gradient_like(n);
      reference::adamw_8bit_step(oracle, copied<double, float>(gradient), map1, map2, static_cast<double>(t), options.lr,
                                 options.beta1, options.beta2, options.eps, options.weight_decay);
      arena.step(gradient, t, options);
      const auto code1 = copied<uint8_t, uint8_t>(arena.state1);
      const auto code2 = copied<uint8_t, uint8_t>(arena.state2);
      for (size_t i = 0; i < code1.size(); ++i) {
        different += (code1[i] != oracle.code1[i]) + (code2[i] != oracle.code2[i]);
        total += 2;
      }
      const at::Tensor expected = at::tensor(oracle.parameter, at::kDouble);
      REQUIRE((arena.parameter.to(at::kDouble) - expected).abs().max().item<double>() <= 5e-7);
      const at::Tensor scale = at::tensor(oracle.absmax2, at::kDouble);
      REQUIRE(((arena.absmax2.to(at::kDouble) - scale).abs() / scale).max().item<double>() <= 1e-6);
    }
  }
  INFO(different << " of " << total << " codes differ");
  REQUIRE(different * 10'000 <= total);
}

TEST_CASE("an entry of the map is stored as itself and a midpoint as the lower of its neighbors", "[ops][cpu]") {
  const auto map = signed_dynamic_map();
  // β₁ = 0 makes m the gradient; the entry 1.0 makes absmax 1, so that the gradients are the quotients.
  const Options options{.lr = 0.0, .beta1 = 0.0, .beta2 = 0.0};
  Arena arena(512);
  std::vector<float> gradient(map.begin(), map.end());
  for (size_t k = 0; k + 1 < map.size(); ++k) gradient.push_back((map[k] + map[k + 1]) / 2);
  gradient.push_back(1.0F);
  arena.step(at::tensor(gradient), 1, options);
  const auto code = copied<int, uint8_t>(arena.state1);
  for (size_t k = 0; k < map.size(); ++k) REQUIRE(code[k] == static_cast<int>(k));
  for (size_t k = 0; k + 1 < map.size(); ++k) {
    const double sum = static_cast<double>(map[k]) + static_cast<double>(map[k + 1]);
    const double twice = 2.0 * static_cast<double>(gradient[256 + k]);  // the float midpoint may lie on either side, or be it
    REQUIRE(code[256 + k] == static_cast<int>(twice > sum ? k + 1 : k));
  }
}

TEST_CASE("coordinates whose gradient is always zero do not move by one bit in 2,000 steps, nor do their codes", "[ops][cpu]") {
  at::manual_seed(2);
  const int64_t n = 3 * 256 + 17;
  Arena arena(n);
  at::Tensor mask = at::rand({n}) < 0.5;
  mask.slice(0, 256, 512).fill_(false);  // and a block of nothing but zeros
  const at::Tensor start = arena.parameter.clone();
  for (int64_t t = 1; t <= 2000; ++t) arena.step(at::randn({n}) * mask, t, {.lr = 1e-2});
  const at::Tensor still = mask.logical_not();
  REQUIRE(at::equal(arena.parameter.masked_select(still), start.masked_select(still)));
  REQUIRE((arena.state1.masked_select(still) == int{ops::kAdamW8bitZeroState1}).all().item<bool>());
  REQUIRE((arena.state2.masked_select(still) == int{ops::kAdamW8bitZeroState2}).all().item<bool>());
  REQUIRE(arena.absmax1[1].item<float>() == 0.0F);
  REQUIRE((arena.parameter.masked_select(mask) != start.masked_select(mask)).all().item<bool>());
}

TEST_CASE("a gradient that is not finite is refused by index and changes nothing", "[ops][cpu]") {
  at::manual_seed(3);
  const float bad = GENERATE(std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                             -std::numeric_limits<float>::infinity(), 1e19F, -3e38F);
  Arena arena(1000);
  arena.step(at::randn({1000}), 1, {});
  const std::vector<at::Tensor> before{arena.parameter.clone(), arena.state1.clone(), arena.state2.clone(), arena.absmax1.clone(),
                                       arena.absmax2.clone()};
  at::Tensor gradient = at::randn({1000});
  gradient[777] = bad;
  gradient[900] = bad;
  try {
    arena.step(gradient, 2, {});
    FAIL("did not throw");
  } catch (const qlorapp::ValueError& error) { REQUIRE(std::string(error.what()).find("at flat index 777.") != std::string::npos); }
  const std::vector<at::Tensor> after{arena.parameter, arena.state1, arena.state2, arena.absmax1, arena.absmax2};
  for (size_t i = 0; i < before.size(); ++i) REQUIRE(at::equal(before[i], after[i]));
}

TEST_CASE("moments down to the smallest float and up to the largest accepted gradient stay finite", "[ops][cpu]") {
  const float size = GENERATE(1e-45F, 1e-38F, 1e-20F, 1e-3F, 1e10F, 9.2e18F);
  at::manual_seed(4);
  Arena arena(512);
  for (int64_t t = 1; t <= 50; ++t) arena.step(at::randn({512}).clamp(-1, 1) * size, t, {.lr = 1e-3});
  REQUIRE(arena.parameter.isfinite().all().item<bool>());
  REQUIRE(arena.absmax1.isfinite().all().item<bool>());
  REQUIRE(arena.absmax2.isfinite().all().item<bool>());
}

TEST_CASE("AdamW names the argument that breaks a rule", "[ops][cpu]") {
  at::Tensor p = at::zeros({300}), m = at::zeros({300}), v = at::zeros({300});
  const at::Tensor g = at::zeros({300});
  const auto message = [&](auto&& call) -> std::string {
    try {
      call();
    } catch (const qlorapp::ValueError& error) { return error.what(); }
    return "";
  };
  using Catch::Matchers::ContainsSubstring;
  REQUIRE_THAT(message([&] { ops::adamw_(p, g, m, v, 0, 1e-3, 0.9, 0.999, 1e-8, 0.0); }),
               ContainsSubstring("[adamw_] step counts from 1; got 0."));
  REQUIRE_THAT(message([&] { ops::adamw_(p, g, m, v, 1, 1e-3, 0.9, 1.0, 1e-8, 0.0); }),
               ContainsSubstring("beta2 must be in [0, 1)"));
  REQUIRE_THAT(message([&] { ops::adamw_(p, g.slice(0, 0, 299), m, v, 1, 1e-3, 0.9, 0.999, 1e-8, 0.0); }),
               ContainsSubstring("gradient must have 300 elements; got 299."));
  REQUIRE_THAT(message([&] { ops::adamw_(p, g.to(at::kHalf), m, v, 1, 1e-3, 0.9, 0.999, 1e-8, 0.0); }),
               ContainsSubstring("gradient must be Float; got Half."));
  Arena arena(300);
  REQUIRE_THAT(message([&] { arena.step(g, 1, {.eps = 0.0}); }), ContainsSubstring("eps must be > 0"));
  arena.absmax2[1] = -1.0;
  REQUIRE_THAT(message([&] { arena.step(g, 1, {}); }),
               ContainsSubstring("every absmax2 must be finite and >= 0; got -1 at block 1."));
  arena.absmax1 = at::zeros({3});
  REQUIRE_THAT(message([&] { arena.step(g, 1, {}); }), ContainsSubstring("absmax1 must have 2 elements; got 3."));
}
