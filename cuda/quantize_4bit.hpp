// SPDX-License-Identifier: Apache-2.0
/// Dense weights to four-bit codes and scales (format/nf4.hpp).
///
/// `kExact` is the rule of the format and bit-equal to the CPU operator quantize_4bit: a block of zeros has the code of zero
/// and absmax 0, and a block that holds NaN or infinity is reported. `kBnbCuda` is bit-equal to bitsandbytes' CUDA build
/// (0.50), which differs from its CPU build:
///     absmax   largest magnitude, NaN ignored, subnormal numbers taken as 0
///     code     of x · r, r the hardware's approximate reciprocal of absmax, subnormal results flushed to 0; NaN has code 0,
///              so that a block of zeros (r = infinity, 0 · r = NaN) is bytes 0x00
///     FP4      by magnitude with strict comparisons, the sign set for x · r < 0
///     thresholds of which four of NF4 and two of FP4 differ from the midpoints by an ulp or two
#pragma once

#include <driver_types.h>

#include <cstdint>

#include "qlorapp/format/nf4.hpp"
#include "types.hpp"

namespace qlorapp::cuda {

enum class FourBitRounding { kExact, kBnbCuda };

struct QuantizeFourBit {
  const void* weight = nullptr;  ///< n elements of `type`, dense.
  int64_t n = 0;
  Float type = Float::kFloat32;
  int64_t block_size = 64;  ///< 32, 64, … 4096.
  QuantType quant_type = QuantType::kNf4;
  FourBitRounding rounding = FourBitRounding::kExact;
  uint8_t* packed = nullptr;  ///< ceil(n / 2) bytes.
  float* absmax = nullptr;    ///< ceil(n / block_size).
  /// kExact: lowered to the first block that holds NaN or infinity; the caller sets it to a larger number before. Codes of such
  /// a block mean nothing. May be null.
  unsigned long long* first_bad_block = nullptr;
};

/// Fast where the weight is aligned to 16 bytes and packed to 4; right everywhere.
/// Asynchronous; allocates nothing.
[[nodiscard]] cudaError_t quantize_4bit(const QuantizeFourBit& work, Stream stream);

}  // namespace qlorapp::cuda
