// SPDX-License-Identifier: Apache-2.0
#include "decode_attention_kernel.hpp"

namespace qlorapp::ops::cpu {

DecodeAttentionKernel decode_attention_kernel(CpuIsa isa, DenseType type, int64_t head_dim) {
  if (type == DenseType::kFloat64 || head_dim % kHeadUnit != 0) return {};
#if defined(__x86_64__)
  if (isa >= CpuIsa::kAvx512) return decode_attention_avx512(type);
  if (isa == CpuIsa::kAvx2) return decode_attention_avx2(type);
#else
  static_cast<void>(isa);
#endif
  return {};
}

}  // namespace qlorapp::ops::cpu
