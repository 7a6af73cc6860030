// SPDX-License-Identifier: Apache-2.0
/// Catch2 v2 (Debian 12) and v3 (Ubuntu 24.04) under one name. Use TEST_CASE, SECTION, GENERATE, REQUIRE_THAT with
/// Catch::Matchers; not Approx, whose namespace moved.
#pragma once

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
namespace Catch::Matchers {
inline auto ContainsSubstring(const std::string& text) { return Contains(text); }  // v3's name; Contains is another matcher there
}  // namespace Catch::Matchers
#endif
