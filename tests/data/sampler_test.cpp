// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/data/sampler.hpp"

#include <algorithm>
#include <numeric>
#include <vector>

#include "catch.hpp"
#include "qlorapp/core/check.hpp"

namespace {

using qlorapp::Sampler;
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

TEST_CASE("a sampler that is set to a position goes on with the batches that would have followed") {
  for (const auto strategy : {SamplingStrategy::kRandom, SamplingStrategy::kGroupByLength}) {
    Sampler whole(23, options(strategy, 23));
    for (int batch = 0; batch < 12; ++batch) {
      Sampler resumed(23, options(strategy, 23));
      resumed.seek(whole.position());
      const bool at_end = whole.at_end_of_epoch();
      const auto rows = whole.next(5);
      REQUIRE(resumed.next(5) == rows);
      REQUIRE(resumed.position() == whole.position());
      REQUIRE(rows.size() == (batch % 5 == 4 ? 3u : 5u));
      REQUIRE(at_end == (batch > 0 && batch % 5 == 0));
    }
  }
}

TEST_CASE("the sampler refuses positions of other data and options that do not fit") {
  Sampler sampler(5, {});
  REQUIRE_THROWS_AS(sampler.seek({0, 6}), qlorapp::ValueError);
  REQUIRE_THROWS_AS(sampler.seek({-1, 0}), qlorapp::ValueError);
  REQUIRE_THROWS_AS(sampler.next(0), qlorapp::ValueError);
  REQUIRE_THROWS_AS(Sampler(0, {}), qlorapp::ValueError);
  REQUIRE_THROWS_AS(Sampler(5, options(SamplingStrategy::kGroupByLength, 4)), qlorapp::ValueError);
  REQUIRE_THROWS_AS(qlorapp::sampling_strategy("randm"), qlorapp::ValueError);
}
