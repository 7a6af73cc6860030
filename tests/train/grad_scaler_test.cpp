// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/train/grad_scaler.hpp"

#include <limits>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "catch.hpp"
#include "core/check.hpp"

using namespace qlorapp;

namespace {

GradScaler::Options on_cpu() { return {.device = at::kCPU}; }

const at::Tensor kOverflow = at::tensor({1.0F, std::numeric_limits<float>::infinity()});

bool one_step(GradScaler& scaler, const at::Tensor& gradient) {
  (void)scaler.scale(at::ones({}));
  const std::vector<at::Tensor> grads{gradient.clone()};
  const bool taken = scaler.step([] {}, grads);
  scaler.update();
  return taken;
}

}  // namespace

TEST_CASE("GradScaler's defaults are torch's", "[train][cpu]") {
  GradScaler scaler(on_cpu());
  REQUIRE(scaler.is_enabled());
  REQUIRE(scaler.get_scale() == 65536.0);
  REQUIRE(scaler.get_growth_factor() == 2.0);
  REQUIRE(scaler.get_backoff_factor() == 0.5);
  REQUIRE(scaler.get_growth_interval() == 2000);
  REQUIRE(field_names<GradScaler::State>()[4] == "_growth_tracker");
}

TEST_CASE("a GradScaler made without options is torch.amp.GradScaler(): for CUDA, and disabled without it", "[train][cpu]") {
  GradScaler scaler;
  REQUIRE(scaler.options().device == at::kCUDA);
  REQUIRE(scaler.is_enabled() == at::hasCUDA());
  REQUIRE(scaler.get_scale() == (at::hasCUDA() ? 65536.0 : 1.0));
}

TEST_CASE("GradScaler halves on overflow and leaves the step untaken; a finite step sees true magnitudes", "[train][cpu]") {
  GradScaler scaler(on_cpu());
  at::Tensor weight = at::ones({3}).requires_grad_();
  const auto train = [&](double factor) {
    weight.mutable_grad() = at::Tensor();
    scaler.scale((weight * factor).sum()).backward();
    const std::vector<at::Tensor> grads{weight.grad()};
    const bool taken = scaler.step([] {}, grads);
    scaler.update();
    return taken;
  };
  REQUIRE_FALSE(train(1e36));  // 1e36 · 65536 overflows fp32
  REQUIRE(scaler.get_scale() == 32768.0);
  REQUIRE(train(0.1));
  REQUIRE(at::equal(weight.grad(), at::full({3}, 0.1F)));
  REQUIRE(scaler.get_scale() == 32768.0);
}

TEST_CASE("fp16 gradients are refused and stay as they are, unless they are allowed", "[train][cpu]") {
  GradScaler scaler(on_cpu());
  (void)scaler.scale(at::ones({}));
  const std::vector<at::Tensor> grads{at::full({2}, 3.0), at::full({2}, 4.0, at::kHalf)};
  REQUIRE_THROWS_AS(scaler.unscale_(grads), ValueError);
  REQUIRE(grads[0][0].item<double>() == 3.0);
  scaler.unscale_(grads, 0, /*allow_fp16=*/true);
  REQUIRE(grads[0][0].item<double>() == 3.0 / 65536);
}

TEST_CASE("strided gradients are unscaled in place and searched whole", "[train][cpu]") {
  GradScaler::Options options = on_cpu();
  options.init_scale = 4.0;
  const double bad = GENERATE(0.0, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN());
  GradScaler scaler(options);
  (void)scaler.scale(at::ones({}));
  const at::Tensor whole = at::full({10, 10}, 8.0);
  if (bad != 0.0) whole[7][3] = bad;
  const std::vector<at::Tensor> grads{whole.t().slice(0, 0, 5), at::full({4}, 8.0)};
  const bool taken = scaler.step([] {}, grads);
  REQUIRE(taken == (bad == 0.0));
  REQUIRE(whole[0][0].item<double>() == 2.0);
  REQUIRE(whole[0][9].item<double>() == 8.0);  // outside the slice
}

TEST_CASE("a disabled GradScaler passes everything through and always steps", "[train][cpu]") {
  GradScaler scaler({.device = at::kCPU, .enabled = false});
  const at::Tensor loss = at::ones({});
  REQUIRE(scaler.scale(loss).is_same(loss));
  REQUIRE(one_step(scaler, kOverflow));
  REQUIRE(scaler.get_scale() == 1.0);
  REQUIRE_FALSE(scaler.state_dict().has_value());
}

TEST_CASE("a step that throws has not been taken", "[train][cpu]") {
  GradScaler scaler(on_cpu());
  (void)scaler.scale(at::ones({}));
  const std::vector<at::Tensor> grads{at::ones({1})};
  REQUIRE_THROWS_AS(scaler.step([] { throw std::runtime_error("disk"); }, grads), std::runtime_error);
  REQUIRE(scaler.step([] {}));
}

TEST_CASE("two outputs are scaled alike, two optimizers may differ in overflow and share the scale", "[train][cpu]") {
  GradScaler scaler(on_cpu());
  const std::vector<at::Tensor> outputs{at::ones({}), at::full({2}, 0.5)};
  const auto scaled = scaler.scale(outputs);
  REQUIRE(scaled[0].item<double>() == 65536.0);
  REQUIRE(scaled[1][1].item<double>() == 32768.0);
  const std::vector<at::Tensor> fine{at::ones({2})}, bad{kOverflow.clone()};
  REQUIRE(scaler.step([] {}, fine, 1));
  REQUIRE_FALSE(scaler.step([] {}, bad, 2));
  scaler.update();
  REQUIRE(scaler.get_scale() == 32768.0);
}

TEST_CASE("the floor stops backing off, and without it the scale goes below 1", "[train][cpu]") {
  GradScaler::Options options = on_cpu();
  GradScaler free(options);
  options.min_scale = 128.0;
  GradScaler floored(options);
  for (int i = 0; i < 20; ++i) {
    REQUIRE_FALSE(one_step(free, kOverflow));
    REQUIRE_FALSE(one_step(floored, kOverflow));
  }
  REQUIRE(floored.get_scale() == 128.0);
  REQUIRE(free.get_scale() == 65536.0 / (1 << 20));
}

TEST_CASE("too many skips in a row stop the run with a diagnosis; one good step starts the count again", "[train][cpu]") {
  GradScaler::Options options = on_cpu();
  options.max_consecutive_skips = 3;
  GradScaler scaler(options);
  for (int i = 0; i < 2; ++i) REQUIRE_FALSE(one_step(scaler, kOverflow));
  REQUIRE(one_step(scaler, at::ones({1})));
  for (int i = 0; i < 2; ++i) REQUIRE_FALSE(one_step(scaler, kOverflow));
  try {
    one_step(scaler, kOverflow);
    FAIL("did not throw");
  } catch (const LossScaleExhausted& error) {
    REQUIRE_THAT(error.what(),
                 Catch::Matchers::StartsWith("[GradScaler] 3 optimizer steps in a row found infinite or NaN gradients; "
                                             "the loss scale is down to 2048."));
  }
  REQUIRE_THROWS_AS(GradScaler({.device = at::kCPU, .min_scale = -1.0}), ValueError);
}

TEST_CASE("a copy of a GradScaler has its own scale and streak, and so has the original", "[train][cpu]") {
  const at::Tensor finite = at::ones({2});
  GradScaler original(on_cpu());
  original.set_growth_interval(3);
  REQUIRE(one_step(original, finite));

  GradScaler copy = original;
  REQUIRE_FALSE(one_step(copy, kOverflow));
  REQUIRE(copy.get_scale() == 32768.0);
  REQUIRE(copy.state_dict()->growth_tracker == 0);
  REQUIRE(original.get_scale() == 65536.0);
  REQUIRE(original.state_dict()->growth_tracker == 1);

  GradScaler assigned(on_cpu());
  assigned = original;
  original.update(8.0);
  REQUIRE(assigned.get_scale() == 65536.0);
  REQUIRE(assigned.get_growth_interval() == 3);
}

TEST_CASE("a copy made within a step knows what the step found, and each finishes it alone", "[train][cpu]") {
  GradScaler original(on_cpu());
  (void)original.scale(at::ones({}));
  const std::vector<at::Tensor> grads{kOverflow.clone()};
  original.unscale_(grads);
  REQUIRE_THROWS_AS(original.check_serializable(), GradScalerAssertion);

  GradScaler copy = original;
  REQUIRE_FALSE(copy.step([] {}));
  copy.update();
  REQUIRE(copy.get_scale() == 32768.0);
  REQUIRE(original.get_scale() == 65536.0);
  REQUIRE_FALSE(original.step([] {}));
  original.update();
  REQUIRE(original.get_scale() == 32768.0);
  REQUIRE_NOTHROW(original.check_serializable());
}
