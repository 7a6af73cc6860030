// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/io/device.hpp"

#include <string>
#include <string_view>
#include <vector>

#include "catch.hpp"
#include "core/check.hpp"
#include "qlorapp/core/log.hpp"

using namespace qlorapp;

TEST_CASE("bfloat16 becomes float16 on GPUs before Ampere and nowhere else") {
  REQUIRE(usable_dtype(at::kBFloat16, 75) == at::kHalf);
  REQUIRE(usable_dtype(at::kBFloat16, 70) == at::kHalf);
  REQUIRE(usable_dtype(at::kBFloat16, 80) == at::kBFloat16);
  REQUIRE(usable_dtype(at::kBFloat16, 120) == at::kBFloat16);
  REQUIRE(usable_dtype(at::kBFloat16, 0) == at::kBFloat16);  // the CPU
  REQUIRE(usable_dtype(at::kFloat, 75) == at::kFloat);
}

TEST_CASE("a dtype that the GPU lacks is exchanged, and that is said") {
  std::vector<std::string> said;
  set_log_sink([&](LogLevel, std::string_view line) { said.emplace_back(line); });
  CHECK(dtype_on(75, at::kHalf) == at::kHalf);
  CHECK(dtype_on(80, at::kBFloat16) == at::kBFloat16);
  CHECK(dtype_on(0, at::kBFloat16) == at::kBFloat16);
  CHECK(said.empty());
  CHECK(dtype_on(75, at::kBFloat16) == at::kHalf);
  CHECK(dtype_on(75, at::kBFloat16) == at::kHalf);  // once in a process
  set_log_sink({});
  REQUIRE(said.size() == 1);
  CHECK(said.front() == "this GPU (sm_75) has no bfloat16 arithmetic: computing in float16, with loss scaling in training");
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
