// SPDX-License-Identifier: Apache-2.0
#include "nn/top_p.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "catch.hpp"

using namespace qlorapp;

namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

std::vector<float> softmax(const std::vector<float>& scores) {
  const float most = std::ranges::max(scores);
  std::vector<double> all;
  for (const float score : scores) all.push_back(std::exp(static_cast<double>(score) - static_cast<double>(most)));
  const double sum = std::accumulate(all.begin(), all.end(), 0.0);
  std::vector<float> found;
  for (const double one : all) found.push_back(static_cast<float>(one / sum));
  return found;
}

/// As TopPLogitsWarper is written: sorted by rising score, those whose sum so far is at most 1 - p leave.
std::vector<float> sorted_and_cut(std::vector<float> scores, double p) {
  const std::vector<float> probabilities = softmax(scores);
  std::vector<size_t> order(scores.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, {}, [&](size_t i) { return scores[i]; });
  double sum = 0;
  for (size_t k = 0; k + 1 < order.size(); ++k) {
    sum += static_cast<double>(probabilities[order[k]]);
    if (sum <= 1 - p) scores[order[k]] = kNever;
  }
  return scores;
}

std::vector<float> kept(std::vector<float> scores, double p) {
  TopP top;
  top.keep(scores, softmax(scores), p);
  return scores;
}

}  // namespace

TEST_CASE("what top_p keeps is what sorting keeps", "[sampling]") {
  std::mt19937 random(5);
  TopP top;  // of all rows: nothing of one is left for the next
  for (const size_t count : {1, 2, 7, 300, 5000}) {
    for (const float spread : {0.01F, 1.0F, 12.0F}) {
      for (const float step : {0.0F, 0.25F}) {  // 0.25: many are equal
        std::normal_distribution<float> normal(-1.0F, spread);
        std::vector<float> scores(count);
        for (float& score : scores) score = step > 0 ? std::round(normal(random) / step) * step : normal(random);
        if (count > 100) std::fill_n(scores.begin() + 3, 40, kNever);
        for (const double p : {0.0, 0.03, 0.5, 0.9, 0.97}) {
          CAPTURE(count, spread, step, p);
          std::vector<float> found = scores;
          top.keep(found, softmax(scores), p);
          CHECK(found == sorted_and_cut(scores, p));
        }
      }
    }
  }
}

TEST_CASE("of equal scores top_p keeps the last, and always one", "[sampling]") {
  CHECK(kept({1, 1, 1, 1}, 0.5) == std::vector<float>{kNever, kNever, 1, 1});
  CHECK(kept({0.0F, -0.0F, 0.0F, -0.0F}, 0.25) == std::vector<float>{kNever, kNever, kNever, 0});
  CHECK(kept({3, 2, 1}, 0.0) == std::vector<float>{3, kNever, kNever});
  CHECK(kept({kNever, 5, kNever}, 0.4) == std::vector<float>{kNever, 5, kNever});
  const float none = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> broken{1, none, 2};
  TopP().keep(broken, std::vector<float>{none, none, none}, 0.5);
  CHECK(broken[0] == 1);
  CHECK(broken[2] == 2);
}
