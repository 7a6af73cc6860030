// SPDX-License-Identifier: Apache-2.0
#include "ops/linear.hpp"

#include <ATen/ATen.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstddef>
#include <fstream>
#include <optional>
#include <tuple>
#include <utility>

#include "catch.hpp"
#include "core/cpu_isa.hpp"
#include "ops/dense_linear.hpp"
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

constexpr CpuIsa kAllSets[] = {CpuIsa::kScalar, CpuIsa::kAvx2, CpuIsa::kAvx512, CpuIsa::kAvx512Bf16};

/// A quantized weight, plain or with double quantization, and its values in each dtype.
struct FourBit {
  int64_t rows, columns, block_size;
  QuantType type;
  at::Tensor packed, absmax;
  std::optional<at::Tensor> nested_absmax, offset;

  FourBit(int64_t n, int64_t k, int64_t block, QuantType book, bool nested) : rows(n), columns(k), block_size(block), type(book) {
    std::tie(packed, absmax) = ops::quantize_4bit(at::randn({n, k}) * 0.1, block, book);
    if (!nested) return;
    offset = absmax.mean();
    at::Tensor scales;
    std::tie(absmax, scales) = ops::quantize_blockwise(absmax - *offset, 256);
    nested_absmax = scales;
  }
  [[nodiscard]] at::Tensor values(at::ScalarType dtype) const {
    const auto shape = {rows, columns};
    return (nested_absmax
                ? ops::dequantize_4bit_nested(packed, absmax, *nested_absmax, *offset, shape, block_size, 256, type, dtype)
                : ops::dequantize_4bit(packed, absmax, shape, block_size, type, dtype))
        .to(at::kDouble);
  }
  [[nodiscard]] at::Tensor product(const at::Tensor& x) const {
    return ops::linear_4bit(x, packed, absmax, nested_absmax, offset, {rows, columns}, block_size, 256, type);
  }
  void product_into(at::Tensor y, const at::Tensor& x, bool accumulate) const {
    ops::linear_4bit_out(y, x, packed, absmax, nested_absmax, offset, {rows, columns}, block_size, 256, type, false, accumulate);
  }
};

/// One rounding of the result and sums in fp32, of each element.
void require_rounded_once(const at::Tensor& y, const at::Tensor& exact) {
  const auto dtype = y.scalar_type();
  const double half_unit = dtype == at::kFloat ? 0x1p-24 : dtype == at::kHalf ? 0x1p-11 : 0x1p-8;
  const at::Tensor limit = exact.abs() * (half_unit * 1.02) + exact.abs().max() * 2e-6;
  REQUIRE((y.to(at::kDouble) - exact).abs().le(limit).all().item<bool>());
}

}  // namespace

TEST_CASE("panels of a weight whose rows cut its blocks give the whole product, both ways and in every dtype", "[ops][cpu]") {
  at::manual_seed(5);
  // Rows of 353 elements begin inside blocks and inside bytes; 6,000 of them make several panels in fp32.
  for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{6000, 353}, {65, 127}, {128, 2048}}) {
    const auto [packed, absmax] = ops::quantize_4bit(at::randn({rows, columns}) * 0.1);
    for (const CpuIsa choice : kAllSets) {
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

TEST_CASE("a few rows times a four-bit weight are sums of its values in the dtype, rounded once", "[ops][cpu]") {
  at::manual_seed(6);
  struct Shape {
    int64_t rows, columns, block_size;
  };
  // Rows no multiple of what a kernel takes at once, rows that begin inside blocks, a single row, and columns that no kernel takes.
  for (const auto& [rows, columns, block] :
       {Shape{37, 256, 64}, {5, 192, 128}, {131, 2112, 64}, {1, 64, 64}, {33, 96, 64}, {18, 320, 32}, {9, 512, 4096}}) {
    for (const QuantType type : {QuantType::kNf4, QuantType::kFp4}) {
      for (const bool nested : {false, true}) {
        const FourBit weight(rows, columns, block, type, nested);
        for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
          const at::Tensor dense = weight.values(dtype);
          for (const int64_t tokens : {1, 2, 3, 5, 8, 16, 17}) {
            const at::Tensor x = at::randn({tokens, columns}).to(dtype);
            const at::Tensor exact = at::mm(x.to(at::kDouble), dense.t()), start = at::randn({tokens, rows}).to(dtype);
            for (const CpuIsa choice : kAllSets) {
              set_cpu_isa(choice);
              require_rounded_once(weight.product(x), exact);
              at::Tensor sum = start.clone();
              weight.product_into(sum, x, /*accumulate=*/true);
              require_rounded_once(sum, exact + start.to(at::kDouble));
            }
          }
        }
      }
    }
  }
  set_cpu_isa(best_cpu_isa());
}

TEST_CASE("a row of the product has the same bits whatever rows stand beside it", "[ops][cpu]") {
  at::manual_seed(7);
  const FourBit weight(203, 2048, 64, QuantType::kNf4, true);
  for (const CpuIsa choice : {CpuIsa::kAvx2, CpuIsa::kAvx512, CpuIsa::kAvx512Bf16}) {
    set_cpu_isa(choice);
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      const at::Tensor x = at::randn({16, 2048}).to(dtype), dense = weight.values(dtype).to(dtype);
      const auto by_dense = [&](const at::Tensor& rows) { return ops::dense_linear(rows, dense); };
      const at::Tensor all = weight.product(x), all_dense = by_dense(x);
      for (int64_t tokens = 1; tokens < 16; ++tokens) {
        const at::Tensor some = x.narrow(0, 16 - tokens, tokens);
        REQUIRE(at::equal(weight.product(some), all.narrow(0, 16 - tokens, tokens)));
        if (dtype != at::kFloat) REQUIRE(at::equal(by_dense(some), all_dense.narrow(0, 16 - tokens, tokens)));
      }
      REQUIRE(at::equal(weight.product(x.t().contiguous().t()), all));  // columns apart
      at::Tensor wide = at::full({16, 203 + 20}, 3.0, x.options());
      weight.product_into(wide.narrow(1, 7, 203), x, /*accumulate=*/false);
      REQUIRE(at::equal(wide.narrow(1, 7, 203), all));
      REQUIRE((wide.narrow(1, 0, 7) == 3).all().item<bool>());
      REQUIRE((wide.narrow(1, 210, 13) == 3).all().item<bool>());
    }
  }
  set_cpu_isa(best_cpu_isa());
}

TEST_CASE("a scale or an element that is not finite shows in the rows that it belongs to alone", "[ops][cpu]") {
  const FourBit weight(8, 128, 64, QuantType::kNf4, false);
  weight.absmax[6].fill_(NAN);  // of row 3
  for (const CpuIsa choice : kAllSets) {
    set_cpu_isa(choice);
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      at::Tensor x = at::ones({3, 128}, dtype);
      x[1][5] = INFINITY;
      const at::Tensor finite = weight.product(x).isfinite();
      REQUIRE(finite.sum().item<int64_t>() == 2 * 7);
      REQUIRE_FALSE(finite.select(1, 3).any().item<bool>());
      REQUIRE_FALSE(finite[1].any().item<bool>());
    }
  }
  set_cpu_isa(best_cpu_isa());
}

TEST_CASE("a few rows times a dense weight are rounded once, in every dtype and layout", "[ops][cpu]") {
  at::manual_seed(8);
  for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{37, 256}, {131, 2112}, {1, 64}, {33, 100}}) {
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      const at::Tensor whole = at::randn({rows, columns + 64}).to(dtype);
      for (const at::Tensor& weight : {whole.narrow(1, 64, columns), whole.narrow(1, 0, columns).t().contiguous().t()}) {
        for (const int64_t tokens : {1, 2, 3, 5, 8, 16, 17}) {
          const at::Tensor x = at::randn({tokens, columns}).to(dtype), start = at::randn({tokens, rows}).to(dtype);
          const at::Tensor exact = at::mm(x.to(at::kDouble), weight.t().to(at::kDouble));
          for (const CpuIsa choice : kAllSets) {
            set_cpu_isa(choice);
            require_rounded_once(ops::dense_linear(x, weight), exact);
            at::Tensor y = at::empty_like(start), sum = start.clone();
            ops::dense_linear_out(y, x, weight);
            require_rounded_once(y, exact);
            ops::dense_linear_out(sum, x, weight, /*accumulate=*/true);
            require_rounded_once(sum, exact + start.to(at::kDouble));
          }
        }
      }
    }
  }
  set_cpu_isa(best_cpu_isa());
  const at::Tensor weight = at::randn({3, 64}).to(at::kBFloat16), x = at::randn({2, 64}).to(at::kBFloat16).requires_grad_();
  REQUIRE(ops::dense_linear(x, weight).requires_grad());
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
