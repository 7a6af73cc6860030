// SPDX-License-Identifier: Apache-2.0
/// Eight-bit blocks over the 256-entry dynamic maps (format/dynamic_map.hpp): scales of scales, quantize_blockwise.
#pragma once

#include <driver_types.h>

#include <cstdint>

#include "types.hpp"

namespace qlorapp::cuda {

enum class DynamicCode {
  kNearest,  ///< The nearest entry, decided in double; a tie goes to the lower one. Bit-equal to the CPU operator.
  /// Bit-equal to bitsandbytes' CUDA build (0.50): fast-math quotient, then a search among the odd entries and a comparison
  /// with the rounded midpoint beside the even one. A block of zeros has code 0.
  kBnbCuda,
};

struct QuantizeBlockwise {
  const float* x = nullptr;
  int64_t n = 0;
  int64_t block_size = 256;  ///< Any number above 0.
  bool is_signed = true;
  DynamicCode rounding = DynamicCode::kNearest;
  uint8_t* codes = nullptr;
  float* absmax = nullptr;                        ///< ceil(n / block_size).
  unsigned long long* first_bad_block = nullptr;  ///< As in quantize_4bit.hpp; for kNearest.
};
[[nodiscard]] cudaError_t quantize_blockwise(const QuantizeBlockwise& work, Stream stream);

struct DequantizeBlockwise {
  const uint8_t* codes = nullptr;
  const float* absmax = nullptr;
  int64_t n = 0;
  int64_t block_size = 256;
  bool is_signed = true;
  Float type = Float::kFloat32;
  void* out = nullptr;
};
/// out = round_to_dtype(fp32(map[code] · absmax)), bit-equal to the CPU operator.
[[nodiscard]] cudaError_t dequantize_blockwise(const DequantizeBlockwise& work, Stream stream);

}  // namespace qlorapp::cuda
