// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/io/compute_dtype.hpp"

#include "catch.hpp"
#include "core/check.hpp"

using namespace qlorapp;
using format::Dtype;

TEST_CASE("a model is computed in the dtype of its checkpoint unless another one is requested") {
  for (const auto& [device, architecture] : {std::pair{at::kCUDA, 80}, {at::kCUDA, 120}, {at::kCPU, 0}}) {
    CHECK(choose_compute_dtype({}, Dtype::kBF16, device, architecture).dtype == at::kBFloat16);
    CHECK(choose_compute_dtype({}, Dtype::kF32, device, architecture).dtype == at::kFloat);
    CHECK(choose_compute_dtype({}, {}, device, architecture).dtype == at::kFloat);
    CHECK(choose_compute_dtype(at::kFloat, Dtype::kBF16, device, architecture).dtype == at::kFloat);
    CHECK(choose_compute_dtype(at::kHalf, Dtype::kBF16, device, architecture).dtype == at::kHalf);
    const ComputeDtype own = choose_compute_dtype({}, Dtype::kBF16, device, architecture);
    CHECK(own.reason == "bfloat16, the dtype of the checkpoint");
    CHECK_FALSE(own.is_substitute);
  }
  CHECK(choose_compute_dtype({}, Dtype::kF16, at::kCUDA, 75).dtype == at::kHalf);
  CHECK(choose_compute_dtype(at::kFloat, Dtype::kF16, at::kCPU, 0).reason == "float32, as requested");
  CHECK(choose_compute_dtype({}, {}, at::kCPU, 0).reason == "float32: config.json names no dtype");
}

TEST_CASE("bfloat16 is computed in float16 on a GPU that lacks it, requested or stored") {
  for (const int64_t architecture : {70, 75}) {
    const ComputeDtype stored = choose_compute_dtype({}, Dtype::kBF16, at::kCUDA, architecture);
    const ComputeDtype requested = choose_compute_dtype(at::kBFloat16, Dtype::kF16, at::kCUDA, architecture);
    for (const ComputeDtype* found : {&stored, &requested}) {
      CHECK(found->dtype == at::kHalf);
      CHECK(found->is_substitute);
    }
  }
  CHECK(choose_compute_dtype({}, Dtype::kBF16, at::kCUDA, 75).reason ==
        "float16: the checkpoint is bfloat16, and sm_75 has no bfloat16 arithmetic");
  CHECK(choose_compute_dtype(at::kBFloat16, {}, at::kCUDA, 75).reason ==
        "float16: bfloat16 is requested, and sm_75 has no bfloat16 arithmetic");
}

TEST_CASE("a float16 checkpoint is computed in float32 on a CPU unless float16 is requested") {
  const ComputeDtype found = choose_compute_dtype({}, Dtype::kF16, at::kCPU, 0);
  CHECK(found.dtype == at::kFloat);
  CHECK(found.is_substitute);
  CHECK(found.reason.find("the checkpoint is float16") != std::string::npos);
  CHECK(choose_compute_dtype(at::kHalf, Dtype::kF16, at::kCPU, 0).dtype == at::kHalf);
}

TEST_CASE("a dtype is spelled as in config.json") {
  CHECK(dtype_text(at::kBFloat16) == "bfloat16");
  CHECK(dtype_text(at::kHalf) == "float16");
  CHECK(dtype_text(at::kFloat) == "float32");
  CHECK_THROWS_AS(dtype_text(at::kLong), ValueError);
}
