// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/train/accumulator.hpp"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "catch.hpp"
#include "core/check.hpp"

using namespace qlorapp;

namespace {

/// A row of tokens with what each is to predict; prompts and row ends carry no target.
Batch batch_of(const std::vector<int64_t>& lengths, int64_t prompt) {
  Batch batch;
  std::vector<int64_t> tokens, targets, positions;
  batch.row_starts.push_back(0);
  for (const int64_t length : lengths) {
    for (int64_t i = 0; i < length; ++i) {
      tokens.push_back((length * 7 + i * 3) % 11);
      const bool scored = i + 1 < length && i >= prompt;
      targets.push_back(scored ? (length + i * 5) % 11 : Batch::kIgnoredTarget);
      batch.target_count += scored;
      positions.push_back(i);
    }
    batch.first_label_count += prompt == 0;
    batch.row_starts.push_back(static_cast<int64_t>(tokens.size()));
  }
  batch.tokens = at::tensor(tokens, at::kLong);
  batch.targets = at::tensor(targets, at::kLong);
  batch.positions = at::tensor(positions, at::kLong);
  return batch;
}

/// Two layers that see each token alone, so that rows laid end to end are rows by themselves.
struct Model {
  at::Tensor embedding, hidden, head;

  explicit Model(at::ScalarType dtype) {
    at::manual_seed(11);
    const auto weight = [&](at::IntArrayRef shape) { return (at::randn(shape, at::kDouble) * 0.5).to(dtype).requires_grad_(); };
    embedding = weight({11, 16});
    hidden = weight({32, 16});
    head = weight({11, 32});
  }
  [[nodiscard]] at::Tensor loss_sum(const Batch& batch) const {
    const at::Tensor x = at::embedding(embedding, batch.tokens).matmul(hidden.t()).tanh().matmul(head.t());
    return at::cross_entropy_loss(x, batch.targets, {}, at::Reduction::Sum, Batch::kIgnoredTarget);
  }
  [[nodiscard]] std::vector<at::Tensor> gradients() const { return {embedding.grad(), hidden.grad(), head.grad()}; }
};

struct Outcome {
  double loss;
  std::vector<at::Tensor> gradients;
};

Outcome accumulated(const std::vector<Batch>& window, at::ScalarType dtype) {
  const Model model(dtype);
  Accumulator accumulator(window);
  for (const Batch& batch : window) {
    const at::Tensor loss_sum = model.loss_sum(batch);
    accumulator.share_of(loss_sum).backward();
  }
  return {accumulator.mean_loss().item<double>(), model.gradients()};
}

/// The definition, without an Accumulator: torch's own mean over one big batch.
Outcome at_once(const std::vector<int64_t>& lengths, int64_t prompt, at::ScalarType dtype) {
  const Model model(dtype);
  const Batch batch = batch_of(lengths, prompt);
  const at::Tensor x = at::embedding(model.embedding, batch.tokens).matmul(model.hidden.t()).tanh().matmul(model.head.t());
  const at::Tensor loss = at::cross_entropy_loss(x, batch.targets, {}, at::Reduction::Mean, Batch::kIgnoredTarget);
  loss.backward();
  return {loss.item<double>(), model.gradients()};
}

double relative(const at::Tensor& a, const at::Tensor& b) {
  return ((a - b).to(at::kDouble).norm() / b.to(at::kDouble).norm()).item<double>();
}

}  // namespace

TEST_CASE("k micro-batches of ragged rows give the loss and gradients of one big batch", "[train][cpu]") {
  const auto dtype = GENERATE(at::kFloat, at::kDouble);
  const int64_t prompt = GENERATE(0, 3);
  const std::vector<std::vector<int64_t>> parts =
      GENERATE(std::vector<std::vector<int64_t>>{{5, 97}, {2, 31}, {64, 4}, {8, 9, 10}},  // a full window
               std::vector<std::vector<int64_t>>{{50}, {3, 2}},                           // a last, partial one
               std::vector<std::vector<int64_t>>{{40}, {1, 1}},                           // a micro-batch without a target
               std::vector<std::vector<int64_t>>{{400, 7}});                              // k = 1
  std::vector<Batch> window;
  std::vector<int64_t> rows;
  for (const auto& lengths : parts) {
    window.push_back(batch_of(lengths, prompt));
    rows.insert(rows.end(), lengths.begin(), lengths.end());
  }
  const Outcome ours = accumulated(window, dtype);
  const Outcome whole = at_once(rows, prompt, dtype);
  const bool fp32 = dtype == at::kFloat;
  REQUIRE(std::fabs(ours.loss - whole.loss) <= (fp32 ? 1e-6 : 1e-12));
  for (size_t i = 0; i < whole.gradients.size(); ++i) {
    REQUIRE(relative(ours.gradients[i], whole.gradients[i]) <= (fp32 ? 5e-6 : 1e-12));
  }
}

TEST_CASE("a mean of the micro-batches' means would be told apart", "[train][cpu]") {
  const std::vector<Batch> window{batch_of({97}, 0), batch_of({3}, 0)};
  const Model model(at::kDouble);
  double mean_of_means = 0;
  for (const Batch& batch : window) {
    mean_of_means += model.loss_sum(batch).item<double>() / static_cast<double>(batch.target_count) / 2;
  }
  REQUIRE(std::fabs(mean_of_means - accumulated(window, at::kDouble).loss) > 1e-2);
}

TEST_CASE("a window without targets has weight 0 and adds exact zeros to the gradients", "[train][cpu]") {
  const std::vector<Batch> window{batch_of({1, 1}, 0), batch_of({2}, 5)};
  Accumulator accumulator(window);
  REQUIRE(accumulator.tokens() == 0);
  REQUIRE(accumulator.weight() == 0.0);
  REQUIRE(accumulator.weight_tensor(at::kCPU).item<float>() == 0.0F);
  const Model model(at::kFloat);
  const at::Tensor loss_sum = model.loss_sum(window[0]);
  const at::Tensor share = accumulator.share_of(loss_sum);
  REQUIRE(share.item<float>() == 0.0F);
  share.backward();
  accumulator.add(model.loss_sum(window[1]));
  REQUIRE(accumulator.mean_loss().item<double>() == 0.0);
  for (const at::Tensor& gradient : model.gradients()) REQUIRE((gradient == 0).all().item<bool>());
}

TEST_CASE("the older count adds one for each row whose first token carries a label", "[train][cpu]") {
  const std::vector<Batch> window{batch_of({10, 20}, 0), batch_of({30}, 4)};
  REQUIRE(Accumulator(window).tokens() == 9 + 19 + 25);
  REQUIRE(Accumulator(window, {.count_position_zero = true}).tokens() == 9 + 19 + 25 + 2);
}

TEST_CASE("the denominator is the count over all ranks, asked for once", "[train][cpu]") {
  const std::vector<int64_t> counts{3, 4};
  int asked = 0;
  Accumulator accumulator(counts, {.count_position_zero = false, .sum_over_ranks = [&](int64_t local) {
                                     ++asked;
                                     REQUIRE(local == 7);
                                     return int64_t{20};
                                   }});
  REQUIRE(asked == 1);
  REQUIRE(accumulator.weight() == 1.0 / 20.0);
  REQUIRE(accumulator.weight_tensor(at::kCPU).item<float>() == 0.05F);
  accumulator.add(at::tensor(10.0));
  accumulator.add(at::tensor(0.0));
  REQUIRE(accumulator.mean_loss().item<double>() == 0.5);
  REQUIRE_THROWS_AS(Accumulator(counts, {.count_position_zero = false, .sum_over_ranks = [](int64_t) { return int64_t{6}; }}),
                    ValueError);
  const std::vector<int64_t> negative{3, -1};
  REQUIRE_THROWS_AS(Accumulator(negative), ValueError);
}

TEST_CASE("a window's loss is summed in double, without the roundings of fp32", "[train][cpu]") {
  const std::vector<int64_t> counts(1000, 1);
  Accumulator accumulator(counts);
  for (int i = 0; i < 1000; ++i) accumulator.add(at::tensor(16777216.0F + 2.0F * static_cast<float>(i % 2)));
  REQUIRE(accumulator.mean_loss().item<double>() == 16777217.0);
}

TEST_CASE("each micro-batch's loss is counted once: neither twice nor not at all", "[train][cpu]") {
  const std::vector<int64_t> counts{3, 5};
  Accumulator accumulator(counts);
  const at::Tensor loss_sum = at::tensor(4.0);
  REQUIRE(accumulator.share_of(loss_sum).item<double>() == 0.5);
  REQUIRE_THROWS_WITH(accumulator.mean_loss(),
                      Catch::Matchers::ContainsSubstring("needs one loss per micro-batch of the window; got 1 of 2"));
  (void)accumulator.share_of(loss_sum);
  REQUIRE(accumulator.mean_loss().item<double>() == 1.0);
  REQUIRE_THROWS_WITH(accumulator.add(loss_sum), Catch::Matchers::ContainsSubstring("must give one loss; got one more than its 2"));
  REQUIRE(accumulator.mean_loss().item<double>() == 1.0);
}
