// SPDX-License-Identifier: Apache-2.0
#include "../../src/ops/cpu/simd.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "catch.hpp"

using namespace qlorapp::ops;

namespace {

/// Every bit pattern of a 16-bit type, its neighbors halfway to the next one in float, and those a float's ulp away.
template <class T>
std::vector<float> interesting_floats() {
  std::vector<float> all;
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float value = static_cast<float>(T(static_cast<uint16_t>(bits), T::from_bits()));
    const float next = static_cast<float>(T(static_cast<uint16_t>((bits + 1) & 0xffffu), T::from_bits()));
    const float middle = value / 2 + next / 2;
    for (const float x : {value, middle, std::nextafter(middle, 0.0f), std::nextafter(middle, INFINITY)}) all.push_back(x);
  }
  for (const float x : {3.4e38f, -3.4e38f, 65519.0f, 65520.0f, 1e-45f, 1e-39f, -1e-8f}) all.push_back(x);
  return all;
}

template <class T>
void check_conversions() {
  const auto floats = interesting_floats<T>();
  std::vector<T> narrowed(floats.size());
  std::vector<float> widened(floats.size());
  simd::vectorized([&, in = floats.data(), out = narrowed.data(), back = widened.data(), n = floats.size()] {
    for (size_t i = 0; i < n; ++i) out[i] = simd::narrow<T>(in[i]);
    for (size_t i = 0; i < n; ++i) back[i] = simd::widen(out[i]);
  });
  size_t wrong = 0;
  for (size_t i = 0; i < floats.size(); ++i) {
    const T want(floats[i]);
    const float value = static_cast<float>(want);
    if (std::isnan(floats[i])) {
      wrong += std::isnan(widened[i]) ? 0 : 1;
    } else {
      wrong += narrowed[i].x != want.x || std::memcmp(&value, &widened[i], sizeof value) != 0 ? 1 : 0;
    }
  }
  REQUIRE(wrong == 0);
}

}  // namespace

TEST_CASE("16-bit conversions round like c10's for every value and every midpoint", "[ops][cpu]") {
  check_conversions<c10::BFloat16>();
  check_conversions<c10::Half>();
}

TEST_CASE("exp is within 1.01 ulp of the exact value, and exact at the ends", "[ops][cpu]") {
  double worst = 0;
  for (float x = -87.3f; x < 88.7f; x += 1.7e-4f) {
    const double want = std::exp(static_cast<double>(x));
    const double ulp = std::ldexp(1.0, std::ilogb(want) - 23);
    worst = std::max(worst, std::abs(static_cast<double>(simd::exp(x)) - want) / ulp);
  }
  REQUIRE(worst < 1.01);
  REQUIRE(simd::exp(0.0f) == 1.0f);
  REQUIRE(simd::exp(-INFINITY) == 0.0f);
  REQUIRE(simd::exp(INFINITY) == INFINITY);
  REQUIRE(simd::exp(100.0f) == INFINITY);
  REQUIRE(std::isnan(simd::exp(NAN)));
}

#if defined(__x86_64__)
TEST_CASE("each instruction set computes the same bits", "[ops][cpu]") {
  std::vector<float> x;
  for (float v = -110.0f; v < 100.0f; v += 1.3e-3f) x.push_back(v);
  const auto run = [&](auto&& with) {
    std::vector<float> y(x.size());
    with([in = x.data(), out = y.data(), n = x.size()] {
      for (size_t i = 0; i < n; ++i) out[i] = simd::widen(simd::narrow<c10::Half>(simd::exp(in[i]))) + simd::exp(in[i]);
    });
    return y;
  };
  const auto want = run([](const auto& f) { f(); });
  if (__builtin_cpu_supports("avx2")) {
    REQUIRE(run([](const auto& f) { simd::inlined_for_avx2(f); }) == want);
  }
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    REQUIRE(run([](const auto& f) { simd::inlined_for_avx512(f); }) == want);
  }
}
#endif
