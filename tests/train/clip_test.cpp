// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/train/clip.hpp"

#include <cmath>
#include <limits>
#include <vector>

#include <ATen/ATen.h>

#include "catch.hpp"
#include "core/check.hpp"

using namespace qlorapp;

TEST_CASE("an arena is clipped like its parameters one by one, and padding behind them does not count", "[train][cpu]") {
  at::manual_seed(3);
  at::Tensor flat = at::randn({1000});
  const std::vector<int64_t> ends{10, 10, 500, 900};
  const std::vector<at::Tensor> parts{flat.slice(0, 0, 10).clone(), flat.slice(0, 10, 500).clone(),
                                      flat.slice(0, 500, 900).clone()};
  const double exact = flat.slice(0, 0, 900).to(at::kDouble).norm().item<double>();

  const at::Tensor norm = clip_grad_norm_(parts, 1.0);
  const at::Tensor arena_norm = clip_grad_norm_(flat, ends, 1.0);
  REQUIRE(std::fabs(norm.item<double>() - exact) <= 1e-6 * exact);
  REQUIRE(arena_norm.item<float>() == norm.item<float>());
  REQUIRE(at::equal(flat.slice(0, 10, 500), parts[1]));
  REQUIRE(std::fabs(global_norm(parts).item<double>() - 1.0) <= 1e-6);
}

TEST_CASE("gradients within max_norm keep every bit, and 0 turns clipping off", "[train][cpu]") {
  const at::Tensor original = at::randn({64});
  std::vector<at::Tensor> gradients{original.clone(), at::Tensor()};
  clip_grad_norm_(gradients, 1e6);
  REQUIRE(at::equal(gradients[0], original));
  const at::Tensor norm = clip_grad_norm_(gradients, 0.0);
  REQUIRE(at::equal(gradients[0], original));
  REQUIRE(norm.item<float>() > 0.0F);
  REQUIRE(global_norm(at::TensorList{}).item<double>() == 0.0);
}

TEST_CASE("the coefficient has torch's 1e-6 beside the norm", "[train][cpu]") {
  std::vector<at::Tensor> gradients{at::tensor({3e-6F})};
  clip_grad_norm_(gradients, 1e-6);
  REQUIRE(std::fabs(gradients[0].item<double>() - 3e-6 / 4) <= 1e-12);
}

TEST_CASE("the norm of gradients that are not finite is not finite", "[train][cpu]") {
  const double bad = GENERATE(std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN());
  const std::vector<at::Tensor> gradients{at::ones({4}), at::full({1}, bad)};
  REQUIRE_FALSE(std::isfinite(global_norm(gradients).item<double>()));
}

TEST_CASE("a negative max_norm and ends that fall are refused", "[train][cpu]") {
  at::Tensor flat = at::ones({10});
  const std::vector<int64_t> good{10}, falling{5, 4}, beyond{11};
  REQUIRE_THROWS_AS(clip_grad_norm_(flat, good, -1.0), ValueError);
  REQUIRE_THROWS_AS(clip_grad_norm_(flat, good, std::numeric_limits<double>::quiet_NaN()), ValueError);
  REQUIRE_THROWS_AS(global_norm(flat, falling), ValueError);
  REQUIRE_THROWS_AS(global_norm(flat, beyond), ValueError);
}

TEST_CASE("an AdapterArena is clipped whole, with the norm of its parameters", "[train][cpu]") {
  AdapterArena arena({{"a", {3, 5}}, {"b", {300}}}, at::kCPU);
  arena.gradient(0).fill_(2.0);
  arena.gradient(1).fill_(1.0);
  const double norm = std::sqrt(15 * 4.0 + 300), scale = 1024.0;
  const at::Tensor before = arena.gradients().clone(), inverse = at::full({}, 1 / scale);
  const GradientNorm plain = gradient_norm(arena, {}, 3.0);
  REQUIRE(std::fabs(plain.norm.item<double>() - norm) <= 1e-5);
  REQUIRE(std::fabs(plain.multiplier.item<double>() - 3.0 / norm) <= 1e-7);
  REQUIRE(plain.found_inf.item<double>() == 0.0);
  REQUIRE(gradient_norm(arena, {}, 0.0).multiplier.item<double>() == 1.0);
  REQUIRE(gradient_norm(arena, {}, 100.0).multiplier.item<double>() == 1.0);
  REQUIRE(at::equal(arena.gradients(), before));

  at::Tensor(arena.gradients()).mul_(scale);
  const GradientNorm unscaled = gradient_norm(arena, inverse, 3.0);
  REQUIRE(at::equal(unscaled.norm, plain.norm));
  REQUIRE(at::equal(unscaled.multiplier * scale, plain.multiplier));
  arena.gradient(1)[299] = GENERATE(std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN());
  REQUIRE(gradient_norm(arena, inverse, 3.0).found_inf.item<double>() == 1.0);
  REQUIRE_FALSE(std::isfinite(gradient_norm(arena, inverse, 3.0).norm.item<double>()));
}
