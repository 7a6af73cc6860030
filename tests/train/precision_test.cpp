// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/train/precision.hpp"

#include "catch.hpp"

using namespace qlorapp;

TEST_CASE("Ampere and newer train in bf16, older GPUs in fp16", "[train][cpu]") {
  REQUIRE(mixed_precision_for({7, 0}) == Precision::kFp16);
  REQUIRE(mixed_precision_for({7, 5}) == Precision::kFp16);
  REQUIRE(mixed_precision_for({8, 0}) == Precision::kBf16);
  REQUIRE(mixed_precision_for({8, 6}) == Precision::kBf16);
  REQUIRE(mixed_precision_for({12, 0}) == Precision::kBf16);
}

TEST_CASE("the choice is said in the lesson's words", "[train][cpu]") {
  REQUIRE(describe_mixed_precision("Tesla T4", mixed_precision_for({7, 5})) == "Tesla T4: Using FP16 with loss scaling");
  REQUIRE(describe_mixed_precision("NVIDIA H200", mixed_precision_for({9, 0})) == "NVIDIA H200: Using BF16 (best)");
  REQUIRE(describe_mixed_precision("", Precision::kFp32).empty());
}
