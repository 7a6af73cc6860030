// SPDX-License-Identifier: Apache-2.0
/// A pass of one token in each of 9 to 128 rows, phase by phase: those of decode_pass.hpp, of which a product is two or three launches. The kernel
/// behind a product adds up its parts and does what follows: heads are normed and turned and go to the cache, gate and up become one, the residual
/// stream takes the sum and its norm is formed.
#pragma once

#include <cstdint>
#include <span>

#include "decode_pass.hpp"
#include "types.hpp"

namespace qlorapp::cuda {

struct WidePass {
  DecodePass pass;                    ///< m of 9 to 128, of it neither phases nor what CTAs of one launch share.
  std::span<const PassPhase> phases;  ///< In host memory.
  int64_t longest = 1;                ///< Keys that a row has at most.
  float* partial = nullptr;           ///< wide_pass_floats() of them.
  unsigned char* laid = nullptr;      ///< wide_pass_bytes(), aligned to 16.
};

/// Whether there are kernels for it: sm_90a, phases that divide_product() takes, up to 16,384 columns of the stream.
[[nodiscard]] bool has_wide_pass(const WidePass& work);
[[nodiscard]] int64_t wide_pass_floats(const WidePass& work, int multiprocessors);
/// Of what lies in the order in which it is multiplied.
[[nodiscard]] int64_t wide_pass_bytes(const WidePass& work);
/// Asynchronous; allocates nothing.
[[nodiscard]] cudaError_t wide_pass(const WidePass& work, int multiprocessors, Stream stream);

}  // namespace qlorapp::cuda
