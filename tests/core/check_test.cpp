// SPDX-License-Identifier: Apache-2.0
#include "core/check.hpp"

#include <array>
#include <vector>

#include "catch.hpp"
#include "core/nearest_name.hpp"
#include "qlorapp/core/units.hpp"

using namespace qlorapp;
using namespace qlorapp::literals;

TEST_CASE("a failed check throws its joined parts, a passed one evaluates none of them", "[core][cpu]") {
  bool evaluated = false;
  const auto part = [&] {
    evaluated = true;
    return "x";
  };
  QLORAPP_CHECK_VALUE(true, "{}", part());
  REQUIRE_FALSE(evaluated);
  try {
    QLORAPP_CHECK_VALUE(false, "[op] n must be in {}; got {} {}", joined(std::vector<int>{1, 2}), 0.5, false);
    FAIL("did not throw");
  } catch (const ValueError& error) { REQUIRE(std::string(error.what()) == "[op] n must be in [1, 2]; got 0.5 false"); }
}

TEST_CASE("a misspelled name finds its neighbor, a stranger finds none", "[core][cpu]") {
  constexpr std::array<std::string_view, 3> known{"learning_rate", "lora_alpha", "max_steps"};
  REQUIRE(nearest_name("learnign-rate", known) == "learning_rate");
  REQUIRE(nearest_name("maxsteps", known) == "max_steps");
  REQUIRE(nearest_name("zzz", known).empty());
}

TEST_CASE("byte counts print three digits with binary units", "[core][cpu]") {
  REQUIRE(to_string(512_KiB) == "512 KiB");
  REQUIRE(to_string(Bytes{5'700'000'000}) == "5.31 GiB");
  REQUIRE(to_string(Bytes{14'000'000}) == "13.4 MiB");
}
