// SPDX-License-Identifier: Apache-2.0
/// Runs the tests of a suite. Exits with 77, which ctest reports as skipped, if no test case made an assertion: all need a GPU then.
#include <cstddef>

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using ListenerBase = Catch::EventListenerBase;
#else
#define CATCH_CONFIG_RUNNER
#include <catch2/catch.hpp>
using ListenerBase = Catch::TestEventListenerBase;
#endif

namespace {

struct Counts {
  size_t cases = 0, assertions = 0;
} counts;

class CountsAssertions : public ListenerBase {
 public:
  using ListenerBase::ListenerBase;
  void testRunEnded(const Catch::TestRunStats& stats) override {
    counts = {.cases = static_cast<size_t>(stats.totals.testCases.total()),
              .assertions = static_cast<size_t>(stats.totals.assertions.total())};
  }
};
CATCH_REGISTER_LISTENER(CountsAssertions)

}  // namespace

int main(int argc, char** argv) {
  constexpr int kSkipped = 77;
  const int failed = Catch::Session().run(argc, argv);
  return failed == 0 && counts.cases > 0 && counts.assertions == 0 ? kSkipped : failed;
}
