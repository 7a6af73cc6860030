// SPDX-License-Identifier: Apache-2.0
#include "core/svg.hpp"

#include "catch.hpp"

using namespace qlorapp;

TEST_CASE("text of a picture cannot become an element of it", "[core][cpu]") {
  REQUIRE(svg::text(1, 2.25, "a <script> & \"b\"\n\x01", "end", " font-size=\"9\"") ==
          "<text x=\"1.0\" y=\"2.2\" text-anchor=\"end\" font-size=\"9\">a &lt;script&gt; &amp; &quot;b&quot;</text>\n");
}

TEST_CASE("an axis has between two and ten ticks, whatever its range", "[core][cpu]") {
  for (double range = 1e-7; range < 1e9; range *= 1.37) {
    const double ticks = range / svg::tick_distance(range);
    INFO(range);
    CHECK(ticks >= 2);
    CHECK(ticks <= 10);
  }
}
