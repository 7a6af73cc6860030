// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cstddef>

#include "quantize_4bit_kernel.hpp"
#include "quantize_4bit_loop.hpp"

namespace qlorapp::ops::cpu {
namespace {

template <class T>
struct Scalar {
  static constexpr int64_t kStep = 1;
  const Encoder& encoder;
  explicit Scalar(const Encoder& e) : encoder(e) {}

  uint32_t largest_magnitude(const T* x, int64_t n) const { return largest_magnitude_scalar(x, n); }
  void encode(const T* x, int64_t n, float factor, uint8_t* packed) const {
    for (int64_t i = 0; i < n; i += 2)
      packed[i / 2] = static_cast<uint8_t>((encode_one(encoder, to_float(x[i]) * factor) << 4U) |
                                           encode_one(encoder, to_float(x[i + 1]) * factor));
  }
};

}  // namespace

int64_t quantize_4bit_scalar(const Quantize4bit& work, int64_t block_begin, int64_t block_end) {
  return quantize_any<Scalar>(work, block_begin, block_end);
}

const Encoder& four_bit_encoder(QuantType type) {
  static constexpr auto make = [](const CodeThresholds& thresholds, const std::array<uint8_t, 16>& order) {
    Encoder encoder{};
    for (size_t i = 0; i < 16; ++i) {
      encoder.thresholds[i] = thresholds[i < 15 ? i : 14];
      encoder.order[i] = order[i];
    }
    return encoder;
  };
  static constexpr Encoder nf4 = make(kNf4Thresholds, kNf4Order);
  static constexpr Encoder fp4 = make(kFp4Thresholds, kFp4Order);
  return type == QuantType::kNf4 ? nf4 : fp4;
}

Quantize4bitKernel quantize_4bit_kernel(CpuIsa isa) {
#if defined(__x86_64__)
  if (isa >= CpuIsa::kAvx512) return quantize_4bit_avx512;
  if (isa == CpuIsa::kAvx2) return quantize_4bit_avx2;
#else
  static_cast<void>(isa);
#endif
  return quantize_4bit_scalar;
}

}  // namespace qlorapp::ops::cpu
