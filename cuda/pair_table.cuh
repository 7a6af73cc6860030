// SPDX-License-Identifier: Apache-2.0
/// Four-bit codes to 16-bit operands in pairs: one look-up a byte, in shared memory.
#pragma once

#include <cstdint>

#include "code_books.cuh"
#include "element.cuh"

namespace qlorapp::cuda {
namespace {

constexpr unsigned kAllLanes = 0xFFFFFFFFU;

/// Pairs of a byte's two elements, [byte][lane].
using PairTable = uint32_t[256][32];

template <class T>
__device__ __forceinline__ void fill(PairTable& table, bool nf4) {
  const unsigned lane = threadIdx.x & 31U;
  const float entry = __ldg((nf4 ? kDeviceNf4 : kDeviceFp4).values + (lane & 15U));
  for (unsigned byte = threadIdx.x; byte < 256U; byte += blockDim.x) {
    const float first = __shfl_sync(kAllLanes, entry, static_cast<int>(byte >> 4U));
    const float second = __shfl_sync(kAllLanes, entry, static_cast<int>(byte & 15U));
    const uint32_t pair = pack_pair<T>(first, second);
#pragma unroll
    for (unsigned i = 0; i < 8; ++i)  // eight lanes write eight different banks' quarters
      *reinterpret_cast<uint4*>(&table[byte][((i + lane) & 7U) * 4U]) = make_uint4(pair, pair, pair, pair);
  }
}
/// A row of the table has 128 bytes, so byte b of the word is moved 8·b - 7 bits down to become an offset.
template <int kByte>
__device__ __forceinline__ uint32_t pair_of(const PairTable& table, uint32_t word, uint32_t lane_bytes) {
  const uint32_t place = kByte == 0 ? word << 7U : word >> (8 * kByte - 7);
  return *reinterpret_cast<const uint32_t*>(reinterpret_cast<const char*>(&table[0][0]) + ((place & 0x7F80U) | lane_bytes));
}

}  // namespace
}  // namespace qlorapp::cuda
