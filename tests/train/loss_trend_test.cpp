// SPDX-License-Identifier: Apache-2.0
#include "train/loss_trend.hpp"

#include <cmath>
#include <functional>
#include <random>
#include <string>

#include "catch.hpp"
#include "train/loss_svg.hpp"

#include <nlohmann/json.hpp>

#include "format/expect_error.hpp"
#include "qlorapp/core/error.hpp"

using namespace qlorapp;

namespace {

/// @param mean  of a step's loss, by its share of the run.  @param noise  its standard deviation.
LossTrend curve(int64_t steps, double noise, const std::function<double(double)>& mean, int seed = 1, int64_t from = 1) {
  std::mt19937 generator(static_cast<unsigned>(seed));
  std::normal_distribution<double> normal;
  LossTrend trend;
  for (int64_t step = from; step <= steps; ++step)
    trend.add(mean(static_cast<double>(step) / static_cast<double>(steps)) + noise * normal(generator), step, steps);
  return trend;
}

}  // namespace

TEST_CASE("curves that fall are never said not to", "[train][cpu]") {
  for (int seed = 0; seed < 100; ++seed) {
    const auto steep = [](double t) { return 0.4 + 2 * std::exp(-5 * t); };
    const auto slow = [](double t) { return 1.6 - 0.1 * t; };  // a tenth of a nat in a noisy run
    const auto late = [](double t) { return t < 0.7 ? 2.0 : 1.5; };
    const auto hump = [](double t) { return t < 0.1 ? 2.0 : t < 0.2 ? 2.6 : 1.2; };
    for (const int64_t steps : {40, 41, 113, 1000}) {
      INFO(seed << " " << steps);
      CHECK_FALSE(curve(steps, 0.05, steep, seed).did_not_fall());
      CHECK_FALSE(curve(steps, 0.02, slow, seed).did_not_fall());
      CHECK_FALSE(curve(steps, 0.1, late, seed).did_not_fall());
      CHECK_FALSE(curve(steps, 0.1, hump, seed).did_not_fall());
    }
  }
}

TEST_CASE("curves that stay or rise are named, with what to try", "[train][cpu]") {
  int named = 0;
  for (int seed = 0; seed < 100; ++seed) {
    named += curve(
                 200, 0.2, [](double) { return 2.3; }, seed)
                     .did_not_fall()
                 ? 1
                 : 0;
    const auto rising = curve(
                            80, 0.1, [](double t) { return 1 + 3 * t; }, seed)
                            .did_not_fall();
    REQUIRE(rising);
    CHECK(rising->rose);
  }
  CHECK(named >= 80);  // chance: two standard errors, or two percent
  CHECK(has(trend_line(curve(80, 0, [](double) { return 2.5; }), 5e-5), "the loss did not fall: 2.5"));
  CHECK(has(trend_line(curve(80, 0, [](double) { return 2.5; }), 5e-5), "5e-05 was used; 1e-4 to 3e-4 is usual"));
  CHECK(has(trend_line(curve(80, 0.1, [](double t) { return 1 + t; }), 0.1), "the loss rose: "));
  CHECK(has(trend_line(curve(80, 0.1, [](double t) { return 1 + t; }), 0.1), "lower learning rate"));
}

TEST_CASE("short runs, halves of runs and broken losses are not judged", "[train][cpu]") {
  const auto flat = [](double) { return 2.0; };
  CHECK(trend_line(curve(3, 0, flat), 1e-4).empty());
  CHECK_FALSE(curve(39, 0, flat).did_not_fall());
  CHECK(curve(40, 0, flat).did_not_fall());
  CHECK_FALSE(curve(200, 0, flat, 1, /*from=*/101).did_not_fall());  // resumed
  CHECK_FALSE(curve(400, 0, [](double t) { return t < 0.5 ? 2.0 : std::nan(""); }).did_not_fall());
  LossTrend trend = curve(200, 0, flat);
  trend.clear();
  CHECK_FALSE(trend.did_not_fall());
}

TEST_CASE("a learning rate far from usual is said, and one of tiny models is not", "[train][cpu]") {
  constexpr int64_t kTiny = 1'000'000, kLarge = 8'000'000'000;
  for (const double usual : {2e-5, 5e-5, 1e-4, 3e-4, 1e-3, 2e-3}) {
    CHECK(learning_rate_line(usual, kTiny).empty());
    CHECK(learning_rate_line(usual, kLarge).empty());
  }
  CHECK(learning_rate_line(1e-2, kTiny).empty());
  CHECK(has(learning_rate_line(1e-2, kLarge), "far above"));
  CHECK(has(learning_rate_line(0.5, kTiny), "far above"));
  CHECK(has(learning_rate_line(1e-6, kTiny), "far below"));
}

TEST_CASE("a loss picture holds each curve once, with gaps where a loss is not finite", "[train][cpu]") {
  const auto history = [](const std::string& text) { return format::parse_json(text, "test", {.allow_nonfinite = true}); };
  const auto count = [](const std::string& text, std::string_view what) {
    int n = 0;
    for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++n;
    return n;
  };
  const std::string whole = loss_svg(history(
      R"([{"loss": 2.5, "learning_rate": 1e-4, "step": 1}, {"loss": 1.5, "learning_rate": 5e-5, "step": 2}, {"eval_loss": 1.75, "step": 2},
          {"loss": NaN, "learning_rate": 0, "step": 3}, {"loss": 1.25, "step": 4}, {"train_loss": 9, "step": 4}, {"loss": "text", "step": 4}])"));
  CHECK(count(whole, "<polyline") == 2);  // training loss, learning rate
  CHECK(count(whole, "<circle") == 2);    // the evaluation, and the training loss behind the gap
  CHECK(has(whole, "training loss, 1.25 at the end"));
  CHECK(has(whole, "evaluation loss, 1.75 at best"));
  CHECK(has(whole, "learning rate, 0.0001 at most"));
  CHECK(whole.find("nan") == std::string::npos);
  CHECK(whole.ends_with("</svg>\n"));
  for (const char* nothing : {"[]", R"([{"loss": Infinity, "step": 1}])", R"([{"epoch": 1}])"})
    CHECK(has(loss_svg(history(nothing)), "no finite loss was logged"));
  CHECK(has(thrown<FormatError>([&] { (void)loss_svg(history("[1]")); }), "must be an object"));
  std::string many = "[";
  for (int i = 1; i <= 50'000; ++i) many += (i > 1 ? "," : "") + (R"({"loss": 1.5, "step": )" + std::to_string(i) + "}");
  CHECK(loss_svg(history(many + "]")).size() < 40'000);
}
