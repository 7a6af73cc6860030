// SPDX-License-Identifier: Apache-2.0
/// Attention of a few queries that share a head of cached keys and values, on plain memory: no torch, no threads.
///
/// Two products: scores of queries and keys, and sums of values. Several queries take a key while it is in registers, and several sums are
/// added up across their registers at once. Sums are in float32, in an order that does not depend on how many queries there are.
#pragma once

#include <cstdint>

#include "core/cpu_isa.hpp"
#include "dequantize_4bit_kernel.hpp"

namespace qlorapp::ops::cpu {

struct CachedHead {
  const void* keys = nullptr;    ///< (count, head_dim); what lies between two keys is `key_stride` elements.
  const void* values = nullptr;  ///< As keys.
  int64_t key_stride = 0, value_stride = 0;
  int64_t count = 0, head_dim = 0;  ///< head_dim: a multiple of kHeadUnit.
  int64_t queries = 0;
  const float* q = nullptr;  ///< (queries, head_dim), scaled.
  float* scores = nullptr;   ///< (queries, count), score_stride apart: q · keysᵀ, or what the values are multiplied with.
  int64_t score_stride = 0;
  float* attended = nullptr;  ///< (queries, head_dim): scores · values is added to it.
};

inline constexpr int64_t kHeadUnit = 16;

struct DecodeAttentionKernel {
  void (*score)(const CachedHead& head) = nullptr;
  void (*sum)(const CachedHead& head) = nullptr;
};

/// @param type  of keys and values.  Null without one: float64, other widths of heads, CPUs without AVX2.
[[nodiscard]] DecodeAttentionKernel decode_attention_kernel(CpuIsa isa, DenseType type, int64_t head_dim);

// One per instruction set; call them through decode_attention_kernel().
DecodeAttentionKernel decode_attention_avx2(DenseType type);
DecodeAttentionKernel decode_attention_avx512(DenseType type);

}  // namespace qlorapp::ops::cpu
