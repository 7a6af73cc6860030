// SPDX-License-Identifier: Apache-2.0
// The step around a model, with a model whose gradients the test chooses.
#include "qlorapp/train/step.hpp"

#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "catch.hpp"
#include "qlorapp/io/device.hpp"

using namespace qlorapp;

namespace {

/// Its gradients are `gradients` times what the loss is scaled by.
struct ChosenGradients {
  AdapterArena& arena;
  at::Tensor gradients;

  LossSum forward_backward(const Batch& batch, const at::Tensor& grad_scale, StepKey, const BlockDone&) {
    at::Tensor(arena.gradients()).add_(gradients * grad_scale);
    return {at::ones({}, arena.values().options()), batch.target_count};
  }
};

struct Run {
  explicit Run(at::Device device, AdamW::State moments, double scale = 0) : arena({{"a", {700}}, {"b", {30, 9}}}, device) {
    at::manual_seed(4);
    arena.values().copy_(at::randn({arena.values().numel()}));
    AdamW::Options options;
    options.state = moments;
    GradScaler::Options scaling;
    scaling.device = device.type();
    scaling.enabled = scale > 0;
    if (scale > 0) scaling.init_scale = scale;
    state.emplace(arena, options, scaling);
    state->base_learning_rate = 0.01;
    state->schedule.type = ScheduleType::kConstant;
    window.resize(1);
    window[0].target_count = 1;
  }
  StepReport step(const at::Tensor& gradients, const StepHooks& hooks = {}) {
    ChosenGradients model{arena, gradients};
    return train_step(model, *state, window, hooks);
  }
  [[nodiscard]] std::vector<at::Tensor> everything() const {
    std::vector<at::Tensor> all{arena.values().cpu().clone()};
    for (const auto& [name, tensor] : state->optimizer.state_tensors()) all.push_back(tensor.cpu().clone());
    return all;
  }

  AdapterArena arena;
  std::optional<TrainState> state;
  std::vector<Batch> window;
};

bool equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  bool same = a.size() == b.size();
  for (size_t i = 0; same && i < a.size(); ++i) same = at::equal(a[i], b[i]);
  return same;
}

at::Tensor some_gradients(const Run& run, int64_t seed) {
  at::manual_seed(static_cast<uint64_t>(seed));
  at::Tensor gradients = at::zeros_like(run.arena.gradients());
  for (const auto& entry : run.arena.entries()) gradients.narrow(0, entry.offset, entry.numel).copy_(at::randn({entry.numel}));
  return gradients;
}

std::vector<at::Device> devices() {
  std::vector<at::Device> all{at::kCPU};
  if (has_gpu()) all.emplace_back(at::kCUDA, 0);
  return all;
}

}  // namespace

TEST_CASE("a step on gradients that are not finite changes neither adapters nor moments, and its norm says so", "[train][cpu]") {
  Run run(GENERATE(from_range(devices())), GENERATE(AdamW::State::kFloat32, AdamW::State::kEightBit));
  run.state->max_grad_norm = GENERATE(0.0, 1.0);
  run.step(some_gradients(run, 1));
  const auto before = run.everything();
  at::Tensor bad = some_gradients(run, 2);
  bad[300] = GENERATE(std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                      -std::numeric_limits<float>::infinity());
  const StepReport report = run.step(bad);
  REQUIRE_FALSE(std::isfinite(report.grad_norm.item<double>()));
  REQUIRE(equal(run.everything(), before));
  REQUIRE(std::isfinite(run.step(some_gradients(run, 3)).grad_norm.item<double>()));
  REQUIRE_FALSE(equal(run.everything(), before));
}

TEST_CASE("a scaled loss gives the step of the plain one, bit for bit, and an overflow none", "[train][cpu]") {
  const at::Device device = GENERATE(from_range(devices()));
  const AdamW::State moments = GENERATE(AdamW::State::kFloat32, AdamW::State::kEightBit);
  Run plain(device, moments), scaled(device, moments, /*scale=*/4096);
  plain.state->max_grad_norm = scaled.state->max_grad_norm = GENERATE(0.0, 1.0, 1e6);
  for (int64_t i = 0; i < 3; ++i) {
    const at::Tensor gradients = some_gradients(plain, i);
    const StepReport expected = plain.step(gradients), found = scaled.step(gradients);
    REQUIRE(found.stepped);
    REQUIRE(at::equal(found.grad_norm, expected.grad_norm));
    REQUIRE(equal(scaled.everything(), plain.everything()));
  }
  const auto before = scaled.everything();
  REQUIRE_FALSE(scaled.step(some_gradients(plain, 9) * 1e36).stepped);  // finite until the loss is scaled
  REQUIRE(equal(scaled.everything(), before));
  REQUIRE(scaled.state->scaler.get_scale() == 2048.0);
  REQUIRE(scaled.state->optimizer.step_count() == 3);
}

TEST_CASE("a step is taken on clipped gradients: the first moment is a tenth of them", "[train][cpu]") {
  Run run(GENERATE(from_range(devices())), AdamW::State::kFloat32);
  const double max_norm = GENERATE(0.0, 0.5, 1e6);
  run.state->max_grad_norm = max_norm;
  const at::Tensor gradients = some_gradients(run, 1).to(at::kDouble);
  const double norm = gradients.norm().item<double>();
  const StepReport report = run.step(gradients.to(at::kFloat));
  REQUIRE(std::fabs(report.grad_norm.item<double>() - norm) <= 1e-6 * norm);
  const double coefficient = max_norm == 0.5 ? 0.5 / (norm + 1e-6) : 1.0;
  const at::Tensor expected = gradients * (0.1 * coefficient), found = run.state->optimizer.state_tensors()[0].second;
  REQUIRE((found.to(at::kDouble) - expected).abs().max().item<double>() <= 1e-6 * expected.abs().max().item<double>());
}

TEST_CASE("hooks run in their order: with the gradients, before the update and behind it, also behind one that is skipped",
          "[train][cpu]") {
  Run run(GENERATE(from_range(devices())), AdamW::State::kFloat32, /*scale=*/4096);
  const at::Tensor gradients = some_gradients(run, 1);
  std::vector<std::string> calls;
  at::Tensor before = run.arena.values().clone();
  const auto note = [&](const char* name) {
    const bool changed = !at::equal(run.arena.values(), before),
               computed = run.arena.gradients().count_nonzero().item<int64_t>() > 0;
    calls.push_back(std::string(name) + (computed ? ", gradients" : "") + (changed ? ", changed" : ""));
  };
  const StepHooks hooks{.before_exchange = [&] { note("exchange"); },
                        .before_optimizer_step = [&] { note("before"); },
                        .after_optimizer_step = [&] { note("after"); }};
  REQUIRE(run.step(gradients, hooks).stepped);
  REQUIRE(calls == std::vector<std::string>{"exchange, gradients", "before, gradients", "after, gradients, changed"});
  calls.clear();
  before = run.arena.values().clone();
  REQUIRE_FALSE(run.step(gradients * 1e36, hooks).stepped);
  REQUIRE(calls == std::vector<std::string>{"exchange, gradients", "before, gradients", "after, gradients"});
}
