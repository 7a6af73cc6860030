// SPDX-License-Identifier: Apache-2.0
/// A pass of one token in each of 9 to 128 rows, phase by phase: those of decode_pass.hpp, of which a product is two or three launches. The kernel
/// behind a product adds up its parts and does what follows: heads are normed and turned and go to the cache, gate and up become one, the residual
/// stream takes the sum and its norm is formed.
#pragma once

#include <cstdint>

#include "decode_pass.hpp"
#include "types.hpp"

namespace qlorapp::cuda {

struct WideMemory {
  float* partial = nullptr;       ///< wide_floats() of them.
  unsigned char* laid = nullptr;  ///< wide_laid_bytes(), of the phase's x in the order in which it is multiplied.
  bool is_laid = false;           ///< By the phase before; else it is laid here.
  unsigned char* next = nullptr;  ///< As `laid`, where next_x, or y of gated layers, is laid; null: nowhere.
};

/// Whether there are kernels for these rows: sm_90a, and phases that divide_product() takes.
[[nodiscard]] bool has_wide_pass(const DecodePass& pass, const PassPhase& product);
[[nodiscard]] int64_t wide_floats(const DecodePass& pass, const PassPhase& product, int multiprocessors);
[[nodiscard]] int64_t wide_laid_bytes(int64_t m, int64_t k);
/// @param attention  the phase behind a product of heads: y is qkv then, whose queries alone are written, and keys and values are in the cache.
/// @returns what the launches say. Asynchronous; allocates nothing.
[[nodiscard]] cudaError_t wide_product(const DecodePass& pass, const PassPhase& product, const PassPhase* attention,
                                       const WideMemory& memory, int multiprocessors, Stream stream);
/// A kSum phase. @param next  as in WideMemory.
[[nodiscard]] cudaError_t wide_sum(const DecodePass& pass, const PassPhase& phase, unsigned char* next, Stream stream);

}  // namespace qlorapp::cuda
