// SPDX-License-Identifier: Apache-2.0
/// Sums and maxima over a block of threads, always in the same order: two runs give the same bits.
#pragma once

namespace qlorapp::cuda {
namespace {  // each file has its own: nothing here is a symbol that another could meet

struct Sum {
  template <class V>
  __device__ static V join(V a, V b) {
    return a + b;
  }
};
struct Max {
  __device__ static float join(float a, float b) { return fmaxf(a, b); }
};

template <class Op, class V>
__device__ inline V across_warp(V value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value = Op::join(value, __shfl_xor_sync(0xffffffffU, value, distance));
  return value;
}

/// Every thread gets the result. blockDim.x is a multiple of 32, at most 1024. `neutral` leaves a value as it is when joined.
template <class Op, class V>
__device__ V across_block(V value, V neutral) {
  __shared__ V parts[32];
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  value = across_warp<Op>(value);
  if (lane == 0) parts[warp] = value;
  __syncthreads();
  value = across_warp<Op>(lane < static_cast<int>(blockDim.x / 32) ? parts[lane] : neutral);
  __syncthreads();  // `parts` may be written again
  return value;
}

}  // namespace
}  // namespace qlorapp::cuda
