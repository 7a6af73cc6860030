// SPDX-License-Identifier: Apache-2.0
#include "few_rows_kernel.hpp"

namespace qlorapp::ops::cpu {
namespace {

bool is_taken(const FewRows& work) {
  if (work.columns % kFewRowsUnit != 0 || work.columns > kFewRowsColumns) return false;
  if (work.dense != nullptr) return work.type == DenseType::kFloat16 || work.type == DenseType::kBFloat16;
  return work.type != DenseType::kFloat64 && has_code_book(work.four_bit.quant_type) &&
         work.four_bit.block_size % kFewRowsUnit == 0;
}

}  // namespace

FewRowsKernel few_rows_kernel(CpuIsa isa, const FewRows& work) {
  if (!is_taken(work)) return {};
#if defined(__x86_64__)
  if (isa == CpuIsa::kAvx512Bf16 && work.type == DenseType::kBFloat16) return few_rows_avx512_bf16(work);
  if (isa >= CpuIsa::kAvx512) return few_rows_avx512(work);
  if (isa == CpuIsa::kAvx2) return few_rows_avx2(work);
#else
  static_cast<void>(isa);
#endif
  return {};
}

}  // namespace qlorapp::ops::cpu
