// SPDX-License-Identifier: Apache-2.0
#include "ops/device_memory.hpp"

#include <optional>

#include "catch.hpp"
#include "environment.hpp"

using namespace qlorapp;

namespace {

constexpr const char* kName = "PYTORCH_ALLOC_CONF";
constexpr const char* kOlder = "PYTORCH_CUDA_ALLOC_CONF";

}  // namespace

TEST_CASE("a user's settings for torch's allocator decide about expandable segments, and without any they are used") {
  const Variable none(kName, nullptr), older_none(kOlder, nullptr);
  CHECK_FALSE(ops::detail::segments_by_environment().has_value());
  for (const char* const name : {kName, kOlder}) {
    for (const char* const off : {"expandable_segments:False", "max_split_size_mb:128", ""}) {
      INFO(name << "=" << off);
      const Variable set(name, off);
      CHECK(ops::detail::segments_by_environment() == std::optional(false));
    }
    const Variable on(name, "max_split_size_mb:128, expandable_segments: True");
    CHECK(ops::detail::segments_by_environment() == std::optional(true));
  }
  const Variable both(kOlder, "expandable_segments:False"), other(kName, "expandable_segments:True");
  CHECK(ops::detail::segments_by_environment() == std::optional(false));  // torch's CUDA allocator reads the older name first
}

TEST_CASE("without a GPU the environment says what plans count with") {
  if (ops::device_room(at::kCPU)) return;
  const Variable none(kName, nullptr), older_none(kOlder, nullptr);
  CHECK(ops::uses_expandable_segments());
  const Variable off(kName, "expandable_segments:False");
  CHECK_FALSE(ops::uses_expandable_segments());
}
