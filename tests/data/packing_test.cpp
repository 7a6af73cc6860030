// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/data/packing.hpp"

#include <ATen/ATen.h>

#include <numeric>
#include <vector>

#include "catch.hpp"
#include "core/check.hpp"
#include "nn/tiny_model.hpp"
#include "qlorapp/data/collate.hpp"

using namespace qlorapp;

namespace {

/// Rows of random tokens, some labels ignored.
std::vector<Example> random_rows(const std::vector<int64_t>& lengths, int64_t vocabulary) {
  at::manual_seed(11);
  std::vector<Example> rows;
  for (const int64_t length : lengths) {
    Example row;
    row.line = std::ssize(rows) + 1;
    for (int64_t i = 0; i < length; ++i) {
      row.input_ids.push_back(static_cast<TokenId>(at::randint(vocabulary, {1}).item<int64_t>()));
      row.labels.push_back(i % 4 == 2 ? Example::kIgnored : row.input_ids.back());
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

const std::vector<int64_t> kLengths{5, 17, 3, 9, 2, 12, 7, 4, 8, 6, 3, 10};

}  // namespace

TEST_CASE("a row goes into the fullest pack that has room, longest rows first", "[data]") {
  const std::vector<int64_t> lengths{4, 2, 3, 1, 3, 2};
  // 4 | 3 | 3 | then 2 finds no room in 4 and opens a pack, the other 2 joins it, and 1 goes to the first of the threes.
  const std::vector<std::vector<int64_t>> expected{{0}, {2, 3}, {4}, {1, 5}};
  REQUIRE(best_fit_decreasing(lengths, 4) == expected);
  REQUIRE_THROWS_AS(best_fit_decreasing(std::vector<int64_t>{5}, 4), ValueError);
  REQUIRE_THROWS_AS(best_fit_decreasing(std::vector<int64_t>{0}, 4), ValueError);
}

TEST_CASE("a pack in a batch is its rows in a batch", "[data]") {
  const std::vector<Example> rows = random_rows({3, 2}, 50);
  Example joined;
  for (const Example& row : rows) {
    joined.input_ids.insert(joined.input_ids.end(), row.input_ids.begin(), row.input_ids.end());
    joined.labels.insert(joined.labels.end(), row.labels.begin(), row.labels.end());
    joined.row_lengths.push_back(std::ssize(row.input_ids));
  }
  const Batch packed = collate(std::vector<Example>{joined}), plain = collate(rows);
  REQUIRE(at::equal(packed.tokens, plain.tokens));
  REQUIRE(at::equal(packed.targets, plain.targets));
  REQUIRE(at::equal(packed.positions, plain.positions));
  REQUIRE(packed.row_starts == plain.row_starts);
  REQUIRE(packed.target_count == plain.target_count);
  for (const std::vector<int64_t>& wrong : {std::vector<int64_t>{3, 3}, {5, 0}, {6, -1}}) {
    joined.row_lengths = wrong;
    REQUIRE_THROWS_AS(collate(std::vector<Example>{joined}), ValueError);
  }
}

TEST_CASE("losses and gradients of packs equal those of their rows one by one", "[data]") {
  const at::Device device = GENERATE(from_range(tiny::devices()));
  CausalLM model = tiny::make_model(at::kFloat, 0, device);
  const std::vector<Example> rows = random_rows(kLengths, model.config().vocab_size);
  const auto run = [&](const std::vector<Example>& examples) {
    model.arena().zero_grad();
    double loss = 0;
    int64_t targets = 0;
    for (const Example& example : examples) {
      const LossSum sum = model.forward_backward(collate(std::vector<Example>{example}).to(device), at::ones({}, device), {});
      loss += sum.loss.item<double>();
      targets += sum.targets;
    }
    return std::tuple{loss, targets, model.arena().gradients().to(at::kCPU, at::kDouble)};
  };
  const auto [loss, targets, gradients] = run(rows);
  const Packed packed = pack(rows, 20, PackingStrategy::kBestFitDecreasing);
  REQUIRE(packed.examples.size() == 5);  // 86 tokens do not fit into four packs of 20
  REQUIRE(packed.cut_tokens == 0);
  const auto [packed_loss, packed_targets, packed_gradients] = run(packed.examples);
  REQUIRE(packed_targets == targets);
  REQUIRE(std::abs(packed_loss - loss) <= 1e-6 * loss);
  REQUIRE(tiny::relative_error(packed_gradients, gradients) < (device.is_cpu() ? 2e-6 : 2e-4));
}

TEST_CASE("a change in one row of a pack leaves the bits of the other rows' logits alone", "[data]") {
  const at::Device device = GENERATE(from_range(tiny::devices()));
  CausalLM model = tiny::make_model(device.is_cpu() ? at::kFloat : at::kHalf, 0, device);
  const at::NoGradGuard no_grad;
  Packed packed = pack(random_rows(kLengths, model.config().vocab_size), 40, PackingStrategy::kBestFitDecreasing);
  Example& example = packed.examples.front();
  REQUIRE(example.row_lengths.size() >= 3);
  const auto logits = [&] {
    return model.logits(model.hidden_states(collate(std::vector<Example>{example}).to(device), false, 0, 0)).cpu();
  };
  const at::Tensor before = logits();
  int64_t begin = 0;
  for (const int64_t length : example.row_lengths) {
    const std::vector<TokenId> kept = example.input_ids;
    for (int64_t i = begin; i < begin + length; ++i) {
      TokenId& token = example.input_ids[static_cast<size_t>(i)];
      token = (token + 1) % static_cast<TokenId>(model.config().vocab_size);
    }
    const at::Tensor after = logits();
    const int64_t end = begin + length, rest = before.size(0) - end;
    REQUIRE(at::equal(after.narrow(0, 0, begin), before.narrow(0, 0, begin)));
    REQUIRE(at::equal(after.narrow(0, end, rest), before.narrow(0, end, rest)));
    REQUIRE_FALSE(at::equal(after.narrow(0, begin, length), before.narrow(0, begin, length)));
    example.input_ids = kept;
    begin = end;
  }
}

TEST_CASE("packing refuses what it cannot pack", "[data]") {
  std::vector<Example> rows = random_rows({4, 4}, 50);
  REQUIRE_THROWS_AS(pack(rows, 1, PackingStrategy::kBestFitDecreasing), ValueError);
  REQUIRE_THROWS_AS(packing_strategy("bdf"), ValueError);
  rows.front().row_lengths = {2, 2};
  REQUIRE_THROWS_AS(pack(rows, 8, PackingStrategy::kBestFitDecreasing), ValueError);
  for (Example& row : rows) {
    row.row_lengths.clear();
    row.labels.assign(row.labels.size(), Example::kIgnored);
  }
  REQUIRE_THROWS_AS(pack(rows, 8, PackingStrategy::kBestFitDecreasing), ValueError);
}
