// SPDX-License-Identifier: Apache-2.0
// Micro-steps that are replayed have the bits of those that are launched.
#include "train/graphed_steps.hpp"

#include <ATen/ATen.h>

#include <memory>
#include <string>
#include <vector>

#include "catch.hpp"
#include "core/check.hpp"
#include "nn/tiny_model.hpp"
#include "ops/launch_graph.hpp"
#include "qlorapp/io/device.hpp"
#include "qlorapp/train/step.hpp"
#include "qlorapp/train/trainer.hpp"

using namespace qlorapp;

namespace {

/// Rows of these lengths, with tokens of their own each time.
Batch graphed_batch(const std::vector<int64_t>& lengths, int64_t vocabulary, at::Device device) {
  Batch batch;
  std::vector<at::Tensor> positions;
  batch.row_starts = {0};
  for (const int64_t length : lengths) {
    batch.row_starts.push_back(batch.row_starts.back() + length);
    positions.push_back(at::arange(length, at::kLong));
  }
  batch.tokens = at::randint(vocabulary, {batch.token_count()}, at::kLong);
  batch.targets = at::randint(vocabulary, {batch.token_count()}, at::kLong);
  batch.positions = at::cat(positions);
  batch.target_count = batch.token_count();
  return batch.to(device);
}

struct GraphedRun {
  std::vector<double> losses;
  at::Tensor adapters;
  int64_t replayed = 0;
};

/// Sixteen steps over three shapes in turn.
GraphedRun run(at::Device device, at::ScalarType dtype, bool graphed, double dropout = 0) {
  CausalLM model = tiny::make_model(dtype, dropout, device);
  model.settings().set_deterministic(true);
  TrainState state(model.arena(), {}, {});
  state.base_learning_rate = 1e-2;
  state.max_grad_norm = 1;
  state.schedule.training_steps = 100;
  GraphedSteps graphs(model);
  at::manual_seed(3);
  GraphedRun result;
  const std::vector<std::vector<int64_t>> shapes{{40, 40}, {80}, {30, 11, 25}};
  for (size_t i = 0; i < 16; ++i) {
    const std::vector<Batch> window{graphed_batch(shapes[i % 3], model.config().vocab_size, device),
                                    graphed_batch(shapes[(i + 1) % 3], model.config().vocab_size, device)};
    const StepReport report = graphed ? train_step(graphs, state, std::span<const Batch>(window))
                                      : train_step(model, state, std::span<const Batch>(window));
    result.losses.push_back(report.mean_loss.item<double>());
  }
  result.adapters = model.arena().values().to(at::kCPU).clone();
  result.replayed = graphs.replayed();
  return result;
}

}  // namespace

TEST_CASE("on a CPU nothing is recorded and nothing changes", "[train][cpu]") {
  const GraphedRun plain = run(at::kCPU, at::kFloat, false), graphed = run(at::kCPU, at::kFloat, true);
  CHECK(graphed.replayed == 0);
  CHECK(graphed.losses == plain.losses);
  CHECK(at::equal(graphed.adapters, plain.adapters));
}

TEST_CASE("on a GPU micro-steps of shapes that come again are replayed with the same bits", "[train][cuda]") {
  if (!has_gpu()) {
    WARN("skipped: there is no GPU");
    return;
  }
  const at::ScalarType dtype = GENERATE(at::kHalf, at::kFloat);
  const at::Device device(at::kCUDA, 0);
  const GraphedRun plain = run(device, dtype, false), graphed = run(device, dtype, true);
  CHECK(graphed.replayed == 2 * 16 - 3 * GraphedSteps::kSeen);
  CHECK(graphed.losses == plain.losses);
  CHECK(at::equal(graphed.adapters, plain.adapters));
  // New masks each time cannot be recorded.
  const GraphedRun dropped = run(device, dtype, true, /*dropout=*/0.2);
  CHECK(dropped.replayed == 0);
}

TEST_CASE("work that cannot be recorded is done once and said, and the next can be", "[train][cuda]") {
  if (!has_gpu()) {
    WARN("skipped: there is no GPU");
    return;
  }
  const at::Device device(at::kCUDA, 0);
  const at::Tensor sum = at::zeros({1000}, at::TensorOptions().dtype(at::kFloat).device(device));
  const auto add = [&](double more) {
    const at::Tensor part =
        at::full({1000}, more, sum.options());  // memory of its own, which a recording takes from the graphs' pool
    sum.add_(part);
  };
  for (const int fails_in : {2, 1}) {  // the recording, or the first run of the work
    sum.zero_();
    int runs = 0;
    std::string why;
    const auto refused = [&] {
      add(1);
      if (++runs == fails_in) {
        QLORAPP_CHECK_VALUE(fails_in == 2, "[test] cannot be done at all.");
        static_cast<void>(sum.sum().item<float>());  // waits for the GPU, which a recording must not
      }
    };
    if (fails_in == 1) {
      CHECK_THROWS_AS(ops::record_launches(device, refused, &why), ValueError);
    } else {
      CHECK(ops::record_launches(device, refused, &why) == nullptr);
      CHECK_FALSE(why.empty());
    }
    CHECK(sum.max().item<float>() == 1.0F);
    CHECK(sum.min().item<float>() == 1.0F);
  }
  std::string why;
  const std::unique_ptr<ops::LaunchGraph> graph = ops::record_launches(
      device, [&] { add(2); }, &why);
  INFO(why);
  REQUIRE(graph != nullptr);
  const at::Tensor filler = at::randn({1 << 20}, sum.options());  // ordinary memory, which no graph writes
  const at::Tensor copy = filler.clone();
  for (int i = 0; i < 3; ++i) graph->replay();
  CHECK(sum.max().item<float>() == 1.0F + 2.0F * 4);
  CHECK(at::equal(filler, copy));
}
