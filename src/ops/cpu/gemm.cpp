// SPDX-License-Identifier: Apache-2.0
#include "gemm.hpp"

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include "ops/device_memory.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace qlorapp::ops::cpu {
namespace {

/// oneDNN obeys this variable, so that a limit set there is a CPU without the instructions.
bool onednn_may_use_16_bit() {
  const char* limit = std::getenv("ONEDNN_MAX_CPU_ISA");
  if (limit == nullptr) return true;
  const std::string_view isa = limit;
  for (const std::string_view enough : {"BF16", "FP16", "AMX", "AVX10", "DEFAULT", "ALL"}) {
    if (isa.find(enough) != std::string_view::npos) return true;
  }
  return false;
}

struct Instructions {
  bool bf16 = false, fp16 = false;
};

Instructions detect() {
  Instructions found;
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__builtin_cpu_supports("avx512f") && onednn_may_use_16_bit() && __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0) {
    const unsigned leaf7_edx = d;
    found.fp16 = (leaf7_edx >> 23 & 1u) != 0;                                                         // AVX512-FP16
    found.bf16 = (leaf7_edx >> 22 & 1u) != 0;                                                         // AMX-BF16
    if (__get_cpuid_count(7, 1, &a, &b, &c, &d) != 0) found.bf16 = found.bf16 || (a >> 5 & 1u) != 0;  // AVX512-BF16
  }
#endif
  return found;
}

/// On Meta there is nothing to multiply, and Python's kernels for it would take a second result.
void multiply_into(at::Tensor out, const at::Tensor& a, const at::Tensor& b) {
  if (!a.is_meta()) at::mm_out(out, a, b);
}

/// Rows of `b` that make a panel of about 4 MiB in float32.
int64_t panel_rows(const at::Tensor& b) { return std::max<int64_t>(64, (int64_t{1} << 20) / std::max<int64_t>(1, b.size(1))); }

}  // namespace

bool multiplies_natively(at::ScalarType dtype) {
  static const Instructions instructions = [] {
    bound_primitive_cache();
    return detect();
  }();
  if (dtype == at::kBFloat16) return instructions.bf16;
  if (dtype == at::kHalf) return instructions.fp16;
  return true;
}

void multiply_transposed(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b) {
  if (multiplies_natively(a.scalar_type())) {
    multiply_into(out, a, b.t());
    return;
  }
  const at::Tensor wide = a.to(at::kFloat);
  const int64_t step = std::min(panel_rows(b), b.size(0));
  const at::Tensor panel = at::empty({step, b.size(1)}, wide.options());
  const at::Tensor product = at::empty({a.size(0) * step}, wide.options());
  for (int64_t begin = 0; begin < b.size(0); begin += step) {
    const int64_t rows = std::min(step, b.size(0) - begin);
    const at::Tensor weight = panel.narrow(0, 0, rows);
    weight.copy_(b.narrow(0, begin, rows));
    const at::Tensor sums = product.narrow(0, 0, a.size(0) * rows).view({a.size(0), rows});
    multiply_into(sums, wide, weight.t());
    out.narrow(1, begin, rows).copy_(sums);
  }
}

void multiply(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b) {
  if (multiplies_natively(a.scalar_type())) {
    multiply_into(out, a, b);
    return;
  }
  const int64_t step = std::min(panel_rows(b), b.size(0));
  at::Tensor sums = at::zeros(out.sizes(), out.options().dtype(at::kFloat));
  const at::Tensor panel = at::empty({step, b.size(1)}, sums.options());
  for (int64_t begin = 0; begin < b.size(0); begin += step) {
    const int64_t rows = std::min(step, b.size(0) - begin);
    const at::Tensor weight = panel.narrow(0, 0, rows);
    weight.copy_(b.narrow(0, begin, rows));
    const at::Tensor wide = a.narrow(1, begin, rows).to(at::kFloat);
    if (!a.is_meta()) at::addmm_out(sums, sums, wide, weight);
  }
  out.copy_(sums);
}

}  // namespace qlorapp::ops::cpu
