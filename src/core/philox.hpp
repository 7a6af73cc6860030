// SPDX-License-Identifier: Apache-2.0
/// Counter-based random numbers: a pure function of a key and a counter, so that a dropout mask can be formed again in a
/// recompute, after a resume or on another device without any saved generator state. Torch-free; constexpr; host and device.
///
/// Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Philox4x32 with ten rounds). The known-answer
/// vectors of that paper's reference implementation are in tests/core/philox_test.cpp.
#pragma once

#include <array>
#include <cstdint>

#if defined(__CUDACC__)
#define QLORAPP_HOST_DEVICE __host__ __device__
#else
#define QLORAPP_HOST_DEVICE
#endif

namespace qlorapp {

/// Four 32-bit words from a 128-bit counter and a 64-bit key.
QLORAPP_HOST_DEVICE constexpr std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53} * counter[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(product0)};
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return counter;
}

/// Names one dropout mask, or the rest of it from an element on: every element follows from these numbers and its index.
struct DropoutKey {
  uint64_t seed = 0;        ///< Of the run.
  uint32_t micro_step = 0;  ///< Micro-batches since the start of the run.
  uint32_t site = 0;        ///< Which layer and projection.
  uint64_t first = 0;       ///< Index in the mask of the tensor's first element, a multiple of 4.
};

/// 32 random bits for each of the elements 4·group … 4·group + 3 from key.first on, which share one generator call.
QLORAPP_HOST_DEVICE constexpr std::array<uint32_t, 4> dropout_bits(const DropoutKey& key, uint64_t group) {
  group += key.first / 4;
  return philox4x32({static_cast<uint32_t>(group), static_cast<uint32_t>(group >> 32), key.micro_step, key.site},
                    {static_cast<uint32_t>(key.seed), static_cast<uint32_t>(key.seed >> 32)});
}

/// An element is kept if its 32 bits, read as an integer, reach this threshold: probability 1 - p to within 2^-32.
QLORAPP_HOST_DEVICE constexpr uint32_t dropout_threshold(double p) { return static_cast<uint32_t>(p * 4294967296.0); }

}  // namespace qlorapp
