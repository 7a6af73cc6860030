// SPDX-License-Identifier: Apache-2.0
/// Attention of one query per row over that row's cached keys, all rows in one launch.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include "types.hpp"

namespace qlorapp::cuda {

struct DecodeAttention {
  Float type;              ///< fp16 or bf16 of q, k, v and out.
  const void* q;           ///< (rows, heads, head_dim), a head's elements together, 16-byte aligned.
  const void* k;           ///< (slots, kv_heads, head_dim), the same.
  const void* v;           ///< As k.
  void* out;               ///< (rows, heads, head_dim), contiguous.
  float* partial;          ///< decode_partial_floats() of them; not read where splits is 1.
  const int64_t* starts;   ///< (rows) on the device: key p of a row is in slot starts + p.
  const int64_t* lengths;  ///< (rows) on the device: its keys, with the query's own; at least 1.
  const int64_t* shared_starts =
      nullptr;  ///< (rows) on the device: of its first shared_lengths keys, a multiple of 16, p is in slot shared_starts + p.
  const int64_t* shared_lengths = nullptr;                           ///< The same; both null: no row shares keys.
  int64_t q_row_stride, q_head_stride, slot_stride, kv_head_stride;  ///< Elements.
  int64_t rows, heads, kv_heads, head_dim;
  int64_t window;      ///< The last keys that the query sees; 0: all.
  int64_t splits = 1;  ///< Into so many parts a row's keys are divided; at most 256.
  int warps = 1;       ///< Of a CTA, that share such a part: 1, 2 or, of at most 128 elements, 4.
  float scale;
};

/// Whether there is a kernel: 16 bits, sm_80 for bf16 and sm_75 for fp16, head_dim of 8, 16 … 256.
[[nodiscard]] bool has_decode_attention(Float type, int64_t head_dim, int architecture);
/// Sets splits and warps for rows of at most `longest` keys, so that the GPU is full to the end.
void divide_keys(DecodeAttention& work, int64_t longest, int multiprocessors);
[[nodiscard]] int64_t decode_partial_floats(const DecodeAttention& work);
cudaError_t decode_attention(const DecodeAttention& work, Stream stream);

}  // namespace qlorapp::cuda
