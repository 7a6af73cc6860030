// SPDX-License-Identifier: Apache-2.0
#include "ops/linear.hpp"

#include <ATen/ATen.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstddef>
#include <fstream>

#include "catch.hpp"
#include "core/cpu_isa.hpp"
#include "ops/operator.hpp"
#include "ops/quantize.hpp"
#include "qlorapp/core/error.hpp"

using namespace qlorapp;

namespace {

/// For a scope, the process may map no more than `more` bytes beyond its present size.
class AddressSpace {
 public:
  explicit AddressSpace(size_t more) {
    size_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    ::getrlimit(RLIMIT_AS, &before_);
    const rlimit now{pages * static_cast<size_t>(::sysconf(_SC_PAGESIZE)) + more, before_.rlim_max};
    ::setrlimit(RLIMIT_AS, &now);
  }
  ~AddressSpace() { ::setrlimit(RLIMIT_AS, &before_); }
  AddressSpace(const AddressSpace&) = delete;
  AddressSpace& operator=(const AddressSpace&) = delete;

 private:
  rlimit before_{};
};

}  // namespace

TEST_CASE("panels of a weight whose rows cut its blocks give the whole product, both ways and in every dtype", "[ops][cpu]") {
  at::manual_seed(5);
  // Rows of 353 elements begin inside blocks and inside bytes; 6,000 of them make several panels in fp32.
  for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{6000, 353}, {65, 127}, {128, 2048}}) {
    const auto [packed, absmax] = ops::quantize_4bit(at::randn({rows, columns}) * 0.1);
    for (const CpuIsa choice : {CpuIsa::kScalar, CpuIsa::kAvx2, CpuIsa::kAvx512}) {
      set_cpu_isa(choice);
      for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
        const at::Tensor dense = ops::dequantize_4bit(packed, absmax, {rows, columns}, 64, QuantType::kNf4, dtype).to(at::kDouble);
        for (const bool transpose : {false, true}) {
          const at::Tensor x = at::randn({5, transpose ? rows : columns}).to(dtype);
          const at::Tensor y =
              ops::linear_4bit(x, packed, absmax, std::nullopt, std::nullopt, {rows, columns}, 64, 256, QuantType::kNf4, transpose);
          const at::Tensor expected = at::mm(x.to(at::kDouble), transpose ? dense : dense.t());
          const double limit = dtype == at::kDouble ? 1e-13 : dtype == at::kFloat ? 2e-6 : dtype == at::kHalf ? 1e-3 : 8e-3;
          REQUIRE(((y.to(at::kDouble) - expected).norm() / expected.norm()).item<double>() < limit);
          REQUIRE(y.scalar_type() == dtype);
        }
      }
    }
    set_cpu_isa(best_cpu_isa());
  }
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // they end the process when an allocation fails
TEST_CASE("a panel that does not fit in memory raises OutOfMemoryError, and the next call works", "[ops][cpu]") {
  const int64_t rows = 64, columns = int64_t{1} << 20;  // a panel of 256 MiB in fp32
  const at::Tensor packed = at::zeros({rows * columns / 2, 1}, at::kByte), absmax = at::ones({rows * columns / 64});
  const at::Tensor x = at::zeros({1, columns});
  const auto product = [&] {
    return ops::linear_4bit(x, packed, absmax, std::nullopt, std::nullopt, {rows, columns}, 64, 256, QuantType::kNf4, false);
  };
  for (int attempt = 0; attempt < 2; ++attempt) {
    const AddressSpace limit(size_t{100} << 20);
    REQUIRE_THROWS_AS(product(), OutOfMemoryError);
  }
  REQUIRE(at::equal(product(), at::zeros({1, rows})));
}
#endif

TEST_CASE("a C++ caller gets a kernel's failure as the library's, and torch's as torch's", "[ops][cpu]") {
  const auto translated = [](const auto& error) {
    try {
      throw error;
    } catch (const c10::Error&) { ops::rethrow_operator_error(); }
  };
  const c10::SourceLocation here{__func__, __FILE__, __LINE__};
  REQUIRE_THROWS_AS(translated(ops::KernelError(here, "rule")), Error);
  REQUIRE_THROWS_AS(translated(ops::KernelOutOfMemory(here, "rule")), OutOfMemoryError);
  REQUIRE_THROWS_AS(translated(c10::ValueError(here, "rule")), ValueError);
  REQUIRE_THROWS_AS(translated(c10::OutOfMemoryError(here, "rule")), c10::OutOfMemoryError);
  const ops::InsideKernel inside;
  REQUIRE_THROWS_AS(translated(ops::KernelError(here, "rule")), ops::KernelError);
}
