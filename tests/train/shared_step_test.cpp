// SPDX-License-Identifier: Apache-2.0
// Several ranks take the step that one process takes: the same sums, in another order.
#include "qlorapp/train/shared_step.hpp"

#include <numeric>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "catch.hpp"
#include "dist/in_ranks.hpp"
#include "nn/tiny_model.hpp"
#include "qlorapp/data/collate.hpp"
#include "qlorapp/train/step.hpp"

using namespace qlorapp;

namespace {

/// Rows of many lengths, some of them packs, some without a target.
std::vector<Example> uneven_rows(int64_t count) {
  at::manual_seed(8);
  std::vector<Example> rows;
  for (int64_t i = 0; i < count; ++i) {
    Example row;
    const int64_t length = 3 + i * 5 % 17;
    for (int64_t at = 0; at < length; ++at) {
      row.input_ids.push_back(static_cast<TokenId>(at::randint(67, {1}).item<int64_t>()));
      row.labels.push_back(i % 5 == 4 || at % 3 == 0 ? Example::kIgnored : row.input_ids.back());
    }
    if (i % 4 == 1) row.row_lengths = {2, length - 2};
    rows.push_back(std::move(row));
  }
  return rows;
}

struct Outcome {
  std::vector<double> losses, norms;
  std::vector<at::Tensor> gradients;
  at::Tensor values;
  int64_t tokens = 0, micro_steps = 0;
};

/// Steps over windows of `batches` micro-batches of all ranks; the last window of seven batches is partial.
Outcome trained(CausalLM& model, Communicator* ranks, int64_t batches, bool in_bf16 = false) {
  static const std::vector<Example> rows = uneven_rows(14);
  GradScaler::Options scaling;
  scaling.enabled = false;
  TrainState state(model.arena(), {}, scaling);
  state.base_learning_rate = 1e-2;
  state.max_grad_norm = 1.0;
  state.schedule.type = ScheduleType::kConstant;
  state.seed = 3;
  state.sums_in_bf16 = in_bf16;
  if (ranks != nullptr) state.ranks = std::shared_ptr<Communicator>(ranks, [](Communicator*) {});
  const int64_t size = ranks != nullptr ? ranks->size() : 1, rank = ranks != nullptr ? ranks->rank() : 0;
  Outcome outcome;
  for (int64_t begin = 0; begin < 7; begin += batches) {
    std::vector<Batch> window;
    for (int64_t i = begin; i < std::min<int64_t>(begin + batches, 7); ++i) {
      if ((i - begin) % size == rank) window.push_back(collate(rows, std::vector<int64_t>{2 * i, 2 * i + 1}));
    }
    const StepReport report = train_step(model, state, std::span<const Batch>(window));
    outcome.losses.push_back(report.mean_loss.item<double>());
    outcome.norms.push_back(report.grad_norm.item<double>());
    outcome.gradients.push_back(model.arena().gradients().clone());
    outcome.tokens += report.input_tokens;
  }
  outcome.micro_steps = state.micro_step;
  outcome.values = model.arena().values().clone();
  return outcome;
}

Outcome trained_alone(double dropout) {
  CausalLM model = tiny::make_model(at::kFloat, dropout);
  return trained(model, nullptr, 4);
}

/// Each rank has a model of its own, with the same numbers.
std::vector<Outcome> trained_by(int64_t size, double dropout, bool in_bf16 = false) {
  std::vector<CausalLM> models;
  for (int64_t rank = 0; rank < size; ++rank) models.push_back(tiny::make_model(at::kFloat, dropout));
  std::vector<Outcome> found(static_cast<size_t>(size));
  on_ranks(size, [&](Communicator& ranks) {
    const auto rank = static_cast<size_t>(ranks.rank());
    found[rank] = trained(models[rank], &ranks, 4, in_bf16);
  });
  return found;
}

double distance(const at::Tensor& a, const at::Tensor& b) { return ((a - b).norm() / b.norm()).item<double>(); }

}  // namespace

TEST_CASE("ranks with ragged, packed and partial windows take the steps of one process", "[train][cpu]") {
  const double dropout = GENERATE(0.0, 0.3);
  const Outcome one = trained_alone(dropout);
  for (const int64_t size : {2, 4}) {  // of four, one has nothing in the last window of three
    const std::vector<Outcome> found = trained_by(size, dropout);
    for (const Outcome& each : found) {
      REQUIRE(each.losses.size() == 2);
      REQUIRE(each.tokens == one.tokens);
      REQUIRE(each.micro_steps == 7);
      for (size_t step = 0; step < 2; ++step) {
        REQUIRE(std::abs(each.losses[step] - one.losses[step]) <= 1e-6);
        REQUIRE(distance(each.gradients[step], one.gradients[step]) <= 5e-6);
      }
      REQUIRE(at::equal(each.values, found.front().values));  // ranks never part
      REQUIRE(distance(each.values, one.values) <= 1e-5);
    }
  }
}

namespace {

/// A model whose first micro-batch fails once.
struct FailsOnce {
  CausalLM& model;
  bool& fails;
  LossSum forward_backward(const Batch& batch, const at::Tensor& grad_scale, StepKey key, const BlockDone& done) {
    if (std::exchange(fails, false)) throw OutOfMemoryError("full");
    return model.forward_backward(batch, grad_scale, key, done);
  }
};

}  // namespace

TEST_CASE("a rank that takes its window again does not meet the others again", "[train][cpu]") {
  const std::vector<Example> rows = uneven_rows(4);
  std::vector<CausalLM> models;
  for (int i = 0; i < 2; ++i) models.push_back(tiny::make_model(at::kFloat, 0.0));
  std::vector<at::Tensor> values(2);
  std::vector<int64_t> attempts(2, 0);
  on_ranks(2, [&](Communicator& ranks) {
    const auto rank = static_cast<size_t>(ranks.rank());
    GradScaler::Options scaling;
    scaling.enabled = false;
    TrainState state(models[rank].arena(), {}, scaling);
    state.base_learning_rate = 1e-2;
    state.schedule.type = ScheduleType::kConstant;
    state.ranks = std::shared_ptr<Communicator>(&ranks, [](Communicator*) {});
    bool fails = rank == 1;
    FailsOnce model{models[rank], fails};
    for (int64_t step = 0; step < 2; ++step) {
      const StepHooks hooks{.sum_counts = sum_counts_once()};
      const int64_t first = static_cast<int64_t>(rank);
      const std::vector<Batch> window{collate(rows, std::vector<int64_t>{first}), collate(rows, std::vector<int64_t>{first + 2})};
      for (bool again = true; again;) {
        ++attempts[rank];
        try {
          again = false;
          (void)train_step(model, state, std::span<const Batch>(window), hooks);
        } catch (const OutOfMemoryError&) { again = true; }
      }
    }
    values[rank] = models[rank].arena().values().clone();
  });
  REQUIRE(attempts == std::vector<int64_t>{2, 3});
  REQUIRE(at::equal(values[0], values[1]));
}

TEST_CASE("gradients that are summed in bfloat16 are near those in float32", "[train][cpu]") {
  const Outcome one = trained_alone(0);
  const std::vector<Outcome> found = trained_by(2, 0, /*in_bf16=*/true);
  const double apart = distance(found[0].gradients[0], one.gradients[0]);
  REQUIRE(apart < 5e-3);
  REQUIRE(apart > 1e-6);  // it is another dtype
}

TEST_CASE("the blocks of an arena follow each other, so that a block's gradients are one range", "[train][cpu]") {
  const CausalLM model = tiny::make_model(at::kFloat);
  const std::vector<int64_t> starts = block_starts(model.arena());
  REQUIRE(starts.size() == 4);
  REQUIRE(starts.front() == 0);
  for (const auto& entry : model.arena().entries()) {
    const auto block = static_cast<size_t>(entry.name[entry.name.find("layers.") + 7] - '0');
    REQUIRE(entry.offset >= starts[block]);
    if (block + 1 < starts.size()) REQUIRE(entry.offset + entry.numel <= starts[block + 1]);
  }
  const AdapterArena mixed({{"layers.1.a", {4}}, {"layers.0.a", {4}}}, at::kCPU);
  REQUIRE(block_starts(mixed).empty());
}
