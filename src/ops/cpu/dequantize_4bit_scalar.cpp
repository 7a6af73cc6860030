// SPDX-License-Identifier: Apache-2.0
#include "dequantize_4bit_kernel.hpp"
#include "dequantize_4bit_loop.hpp"

namespace qlorapp::ops::cpu {

void dequantize_4bit_scalar(const Dequantize4bit& work, int64_t begin, int64_t end, void* dense) {
  dequantize_any<ScalarLevels>(work, begin, end, dense);
}

void block_scales(const Dequantize4bit& work, int64_t block_begin, int64_t count, float* scales) {
  if (work.absmax_codes == nullptr) {
    for (int64_t i = 0; i < count; ++i) scales[i] = work.absmax[block_begin + i];
    return;
  }
  int64_t group = block_begin / work.nested_block_size;
  int64_t i = 0;
  while (i < count) {
    const int64_t group_end = (group + 1) * work.nested_block_size - block_begin;
    const int64_t stop = group_end < count ? group_end : count;
    const float nested_absmax = work.nested_absmax[group++];
    for (; i < stop; ++i) scales[i] = decode_scale(work.absmax_codes[block_begin + i], nested_absmax, work.nested_offset);
  }
}

const float* four_bit_code_book(QuantType type) { return code_book_of(type).data(); }

Dequantize4bitKernel dequantize_4bit_kernel(CpuIsa isa, QuantType type) {
  if (!has_code_book(type)) return dequantize_blocks;
#if defined(__x86_64__)
  if (isa >= CpuIsa::kAvx512) return dequantize_4bit_avx512;
  if (isa == CpuIsa::kAvx2) return dequantize_4bit_avx2;
#else
  static_cast<void>(isa);
#endif
  return dequantize_4bit_scalar;
}

}  // namespace qlorapp::ops::cpu
