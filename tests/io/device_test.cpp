// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/io/device.hpp"

#include "catch.hpp"
#include "qlorapp/core/check.hpp"

using namespace qlorapp;

TEST_CASE("bfloat16 becomes float16 on GPUs before Ampere and nowhere else") {
  REQUIRE(usable_dtype(at::kBFloat16, 75) == at::kHalf);
  REQUIRE(usable_dtype(at::kBFloat16, 70) == at::kHalf);
  REQUIRE(usable_dtype(at::kBFloat16, 80) == at::kBFloat16);
  REQUIRE(usable_dtype(at::kBFloat16, 120) == at::kBFloat16);
  REQUIRE(usable_dtype(at::kBFloat16, 0) == at::kBFloat16);  // the CPU
  REQUIRE(usable_dtype(at::kFloat, 75) == at::kFloat);
}

TEST_CASE("a device is named by text, and a wrong one is refused with a way out") {
  REQUIRE(parse_device("cpu") == at::Device(at::kCPU));
  REQUIRE(parse_device("auto").is_cuda() == has_gpu());
  for (const char* wrong : {"gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:9999", "cpu:0", ""}) {
    REQUIRE_THROWS_AS(parse_device(wrong), ValueError);
  }
  REQUIRE_THROWS_AS(parse_device("cuda:512"), ValueError);
  if (!has_gpu()) {
    REQUIRE_THROWS_AS(parse_device("cuda"), ValueError);
    return;
  }
  REQUIRE(parse_device("cuda") == at::Device(at::kCUDA, 0));
  REQUIRE(gpu_architecture(parse_device("cuda")) >= 75);
}
