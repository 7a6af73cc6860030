// SPDX-License-Identifier: Apache-2.0
/// The linear layers of a block that read one input, for few rows of it, in one launch: four-bit weights side by side, each with its low-rank
/// adapter.
///
///     y[:, own columns] = round( x·Wᵀ + scaling · u·Bᵀ + bias ),   u = round( x·Aᵀ )
/// Sums as in gemm_4bit.hpp, with one rounding at the end. Which kernel runs, and in which order it adds, depends on the shape and on the number
/// of rows of x alone.
#pragma once

#include <driver_types.h>

#include <cstdint>

#include "qlorapp/format/nf4.hpp"
#include "types.hpp"

namespace qlorapp::cuda {

struct GroupWeight {
  const uint8_t* packed = nullptr;  ///< (n, k) flattened; aligned to 16 bytes.
  const void* absmax = nullptr;     ///< float32, aligned to 16 bytes; or uint8 codes, to 4, if `nested_absmax` is set.
  const float* nested_absmax = nullptr;
  const float* nested_offset = nullptr;  ///< In device memory.
  int64_t n = 0;
  const void* b = nullptr;  ///< (n, rank) contiguous, in the type of x; null: no adapter.
  int64_t rank = 0;
  int64_t u_column = 0;  ///< Where the layer's part of u begins.
  float scaling = 1;
};

struct GemmFourBitGroup {
  static constexpr int kMostWeights = 4;

  const void* x = nullptr;  ///< (m, k), rows `x_stride` apart; aligned to 16 bytes, as every row is.
  int64_t x_stride = 0;
  void* y = nullptr;  ///< (m, Σ n), rows `y_stride` apart.
  int64_t y_stride = 0;
  Float type = Float::kFloat16;  ///< kFloat16 or kBFloat16, of x, y, u, b and bias.
  int64_t m = 0, k = 0;
  GroupWeight weights[kMostWeights];  // NOLINT: of kernels, too
  int count = 0;
  const void* a = nullptr;  ///< (Σ rank, k) contiguous, aligned to 16 bytes, where forms_u(): u is formed here. Else not read.
  void* u = nullptr;        ///< (m, Σ rank) contiguous, written or read; null: no adapters.
  int64_t ranks = 0;        ///< Σ rank.
  unsigned* counters =
      nullptr;  ///< Two, 0 before and after; of up to 8 rows. Launches that share them follow each other in a stream.
  const void* bias = nullptr;  ///< (Σ n); null: none.
  int64_t nested_block_size = 256;
  QuantType quant_type = QuantType::kNf4;
  float* partial = nullptr;  ///< gemm_4bit_group_floats() of them.
};

/// Whether there is a kernel: sm_90 and newer with as much shared memory as sm_90 has (12.x has less), m up to 128, k a multiple of 256, blocks of 64.
/// @param arch  what code_architecture() says.  @param shared_bytes  that a CTA can have on the device (cudaDevAttrMaxSharedMemoryPerBlockOptin).
/// @param reserved_bytes  that the system keeps of it (cudaDevAttrReservedSharedMemoryPerBlock): the kernel of up to 8 rows counts on 1024.
[[nodiscard]] bool has_gemm_4bit_group(int64_t m, int64_t k, int64_t block_size, int64_t nested_block_size, Float type, int arch,
                                       int64_t shared_bytes, int64_t reserved_bytes);
/// Whether the launch forms u from a. Reads what is not memory of the work.
[[nodiscard]] bool forms_u(const GemmFourBitGroup& work);
/// Of memory between its launches; 0 where there is one.
[[nodiscard]] int64_t gemm_4bit_group_floats(const GemmFourBitGroup& work, int multiprocessors);
/// Asynchronous; allocates nothing.
[[nodiscard]] cudaError_t gemm_4bit_group(const GemmFourBitGroup& work, int multiprocessors, Stream stream);

}  // namespace qlorapp::cuda
