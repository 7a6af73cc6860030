// SPDX-License-Identifier: Apache-2.0
#include "dropout.hpp"

#include "pack.cuh"

namespace qlorapp::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kGroup = 4;  // elements that share one generator call

__device__ inline float dropped(float x, uint32_t bits, uint32_t threshold, float keep_scale) {
  return bits >= threshold ? __fmul_rn(x, keep_scale) : 0.0F;
}

/// Philox4x32 with ten rounds; the words of elements 4·group … 4·group + 3 of x.
__device__ inline uint4 bits_of(MaskKey key, uint64_t group) {
  group += key.first / kGroup;
  uint4 counter{static_cast<uint32_t>(group), static_cast<uint32_t>(group >> 32), key.micro_step, key.site};
  auto key0 = static_cast<uint32_t>(key.seed), key1 = static_cast<uint32_t>(key.seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53} * counter.x, product1 = uint64_t{0xCD9E8D57} * counter.z;
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter.y ^ key0, static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter.w ^ key1, static_cast<uint32_t>(product0)};
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  return counter;
}

/// 16 bytes a thread: one or two generator calls.
template <class T>
__global__ void dropout_kernel(const T* x, T* y, int64_t packs, MaskKey key, uint32_t threshold, float keep_scale) {
  constexpr int n = kPack<T>;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= packs) return;
  float values[n];
  load_pack(x + i * n, values);
#pragma unroll
  for (int g = 0; g < n / kGroup; ++g) {
    const uint4 bits = bits_of(key, static_cast<uint64_t>(i * (n / kGroup) + g));
    const uint32_t words[kGroup] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int j = 0; j < kGroup; ++j) values[g * kGroup + j] = dropped(values[g * kGroup + j], words[j], threshold, keep_scale);
  }
  store_pack(y + i * n, values);
}

/// Elements [begin, n), a group of four a thread: the tail, or all of an unaligned tensor. begin is a multiple of four.
template <class T>
__global__ void dropout_any_kernel(const T* x, T* y, int64_t begin, int64_t n, MaskKey key, uint32_t threshold, float keep_scale) {
  const int64_t group = begin / kGroup + static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (group * kGroup >= n) return;
  const uint4 bits = bits_of(key, static_cast<uint64_t>(group));
  const uint32_t words[kGroup] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int j = 0; j < kGroup; ++j) {
    const int64_t i = group * kGroup + j;
    if (i < n) y[i] = narrow<T>(dropped(widen(x[i]), words[j], threshold, keep_scale));
  }
}

}  // namespace

cudaError_t seeded_dropout(Float type, const void* x_data, void* y_data, int64_t n, MaskKey key, uint32_t threshold,
                           float keep_scale, Stream stream) {
  if (n == 0) return cudaSuccess;
  return with_type(type, [&]<class T>(T) {
    const auto* x = static_cast<const T*>(x_data);
    auto* y = static_cast<T*>(y_data);
    const int64_t packs = aligned(x) && aligned(y) ? n / kPack<T> : 0;
    if (packs > 0) {
      const auto grid = static_cast<unsigned>((packs + kThreads - 1) / kThreads);
      dropout_kernel<T><<<grid, kThreads, 0, stream>>>(x, y, packs, key, threshold, keep_scale);
    }
    const int64_t begin = packs * kPack<T>;
    if (begin < n) {
      const int64_t groups = (n - begin + kGroup - 1) / kGroup;
      const auto grid = static_cast<unsigned>((groups + kThreads - 1) / kThreads);
      dropout_any_kernel<T><<<grid, kThreads, 0, stream>>>(x, y, begin, n, key, threshold, keep_scale);
    }
    return cudaGetLastError();
  });
}

}  // namespace qlorapp::cuda
