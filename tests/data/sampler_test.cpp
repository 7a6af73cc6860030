// SPDX-License-Identifier: Apache-2.0
#include "data/sampler.hpp"

#include <algorithm>
#include <numeric>
#include <vector>

#include "catch.hpp"
#include "core/check.hpp"

namespace {

using qlorapp::SamplerOptions;
using qlorapp::SamplingStrategy;

SamplerOptions options(SamplingStrategy strategy, int64_t rows) {
  SamplerOptions out;
  out.strategy = strategy;
  for (int64_t i = 0; i < rows; ++i) out.lengths.push_back(i * 7 % 13);
  out.group_size = 4;
  return out;
}

}  // namespace

TEST_CASE("an epoch visits each row once, in every strategy") {
  for (const auto strategy : {SamplingStrategy::kRandom, SamplingStrategy::kSequential, SamplingStrategy::kGroupByLength}) {
    for (const int64_t rows : {1, 2, 37}) {
      auto order = qlorapp::epoch_order(rows, 3, options(strategy, rows));
      std::sort(order.begin(), order.end());
      std::vector<int64_t> all(static_cast<std::size_t>(rows));
      std::iota(all.begin(), all.end(), int64_t{0});
      REQUIRE(order == all);
    }
  }
}

TEST_CASE("epochs differ from each other, and each is the same whenever it is asked for") {
  for (const auto strategy : {SamplingStrategy::kRandom, SamplingStrategy::kGroupByLength}) {
    const auto third = qlorapp::epoch_order(23, 3, options(strategy, 23));
    REQUIRE(third != qlorapp::epoch_order(23, 4, options(strategy, 23)));
    REQUIRE(third == qlorapp::epoch_order(23, 3, options(strategy, 23)));
  }
}

TEST_CASE("an order refuses what does not fit") {
  REQUIRE_THROWS_AS(qlorapp::epoch_order(0, 0, {}), qlorapp::ValueError);
  REQUIRE_THROWS_AS(qlorapp::epoch_order(5, -1, {}), qlorapp::ValueError);
  REQUIRE_THROWS_AS(qlorapp::epoch_order(5, 0, options(SamplingStrategy::kGroupByLength, 4)), qlorapp::ValueError);
  REQUIRE_THROWS_AS(qlorapp::sampling_strategy("randm"), qlorapp::ValueError);
}
