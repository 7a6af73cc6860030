// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/train/token_statistics.hpp"

#include <ATen/ATen.h>

#include "catch.hpp"

using namespace qlorapp;

TEST_CASE("parts of a micro-batch count as one, and fillers not at all", "[train]") {
  TokenStatistics statistics;
  const auto add = [&](int64_t first_token, float entropy, float correct, int64_t targets) {
    Batch batch;
    batch.first_token = first_token;
    statistics.add(batch, {.loss = at::zeros({}), .targets = targets, .statistics = at::tensor({entropy, correct})});
  };
  REQUIRE(!statistics.table().defined());
  add(0, 2, 1, 4);
  add(0, 3, 0, 5);
  add(7, 10, 2, 6);
  add(11, 20, 3, 1);
  add(0, 0, 0, 0);
  statistics.add(Batch::filler(0), {.loss = at::zeros({}), .targets = 0, .statistics = at::ones({2})});
  REQUIRE(at::equal(statistics.table(), at::tensor({2., 1., 4., 33., 5., 12., 0., 0., 0.}, at::kFloat).view({3, 3})));
  statistics.add({}, {.loss = at::zeros({}), .targets = 3});  // not asked for
  REQUIRE(statistics.table().size(0) == 3);
}
