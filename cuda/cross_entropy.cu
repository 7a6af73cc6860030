// SPDX-License-Identifier: Apache-2.0
#include "cross_entropy.hpp"

#include <algorithm>
#include <cfloat>

#include "pack.cuh"
#include "reduce.cuh"

namespace qlorapp::cuda {
namespace {

constexpr int kThreads = 1024;

/// e^(x − m). For float in base e and exact to an ulp or two. For 16-bit logits as 2^(x·log₂e − m'), one multiply-add and one
/// instruction: the argument's rounding, 2^-19 at a distance of 40, is far below the resolution of the logits.
template <class T>
struct Exponential {
  static constexpr bool kBase2 = !std::is_same_v<T, float>;
  static constexpr float kLog2E = 1.44269504088896341F, kLn2 = 0.693147180559945309F;
  __device__ static float scaled(float x) { return kBase2 ? x * kLog2E : x; }
  __device__ static float of_difference(float x, float m) {
    if constexpr (kBase2) {
      float result;
      asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(fmaf(x, kLog2E, -m)));
      return result;
    } else {
      return expf(x - m);
    }
  }
  /// e^(m − n) of two maxima in the scale of `scaled`.
  __device__ static float of_maxima(float m, float n) { return kBase2 ? exp2f(m - n) : expf(m - n); }
  __device__ static float natural(float m) { return kBase2 ? m * kLn2 : m; }
};

/// The running maximum (scaled) and sum of exponentials.
template <class T>
struct Online {
  float m = -FLT_MAX, sum = 0;

  __device__ void raise(float highest) {
    if (highest <= m) return;
    sum *= Exponential<T>::of_maxima(m, highest);
    m = highest;
  }
  template <int n>
  __device__ void add(const float (&values)[n]) {
    float highest = values[0];
#pragma unroll
    for (int j = 1; j < n; ++j) highest = fmaxf(highest, values[j]);
    raise(Exponential<T>::scaled(highest));
#pragma unroll
    for (int j = 0; j < n; ++j) sum += Exponential<T>::of_difference(values[j], m);
  }
};

template <class T>
struct Arguments {
  T* logits;
  int64_t stride;
  const int64_t* targets;
  float* losses;
  const float* grad_scale;
  int64_t vocabulary;
  int kept;  // packs of a row that shared memory holds
};

/// What all threads know of a row once it has been read.
template <class T>
__device__ inline Online<T> finish(Online<T> mine) {
  Online<T> row;
  row.m = across_block<Max>(mine.m, -FLT_MAX);
  row.sum = across_block<Sum>(mine.sum * Exponential<T>::of_maxima(mine.m, row.m), 0.0F);
  return row;
}

template <class T>
__device__ inline float loss_of(const Online<T>& row, float at_target) {
  return logf(row.sum) + (Exponential<T>::natural(row.m) - at_target);
}

/// One block a row. kWhole: 16 bytes at a time, the last few elements of an odd vocabulary one by one.
template <class T, bool gradient, bool kWhole>
__global__ void __launch_bounds__(kThreads, 1) row_kernel(const Arguments<T> a) {
  extern __shared__ uint4 kept[];
  constexpr int n = kPack<T>;
  constexpr int kFlight = 4;
  const int64_t target = a.targets[blockIdx.x];
  T* logits = a.logits + static_cast<int64_t>(blockIdx.x) * a.stride;
  const int packs = kWhole ? static_cast<int>(a.vocabulary / n) : 0;
  const int thread = static_cast<int>(threadIdx.x);
  if (target < 0 || target >= a.vocabulary) {
    if (thread == 0) a.losses[blockIdx.x] = target < 0 ? 0.0F : __int_as_float(0x7fc00000);
    if constexpr (gradient) {
      for (int i = thread; i < packs; i += kThreads) store_raw(logits + static_cast<int64_t>(i) * n, make_uint4(0, 0, 0, 0));
      for (int64_t i = static_cast<int64_t>(packs) * n + thread; i < a.vocabulary; i += kThreads) logits[i] = narrow<T>(0.0F);
    }
    return;
  }
  const float at_target = widen(logits[target]);  // before anything is written: see the barrier in finish()
  Online<T> mine;
  for (int base = thread; base < packs; base += kFlight * kThreads) {
    uint4 raw[kFlight];
#pragma unroll
    for (int f = 0; f < kFlight; ++f) {
      const int i = base + f * kThreads;
      if (i < packs) raw[f] = load_raw(logits + static_cast<int64_t>(i) * n);
    }
#pragma unroll
    for (int f = 0; f < kFlight; ++f) {
      const int i = base + f * kThreads;
      if (i >= packs) continue;
      if (i < a.kept) kept[i] = raw[f];
      float values[n];
      unpack<T>(raw[f], values);
      mine.add(values);
    }
  }
  for (int64_t i = static_cast<int64_t>(packs) * n + thread; i < a.vocabulary; i += kThreads) {
    const float value[1] = {widen(logits[i])};
    mine.add(value);
  }
  const Online<T> row = finish(mine);
  if (thread == 0) a.losses[blockIdx.x] = loss_of(row, at_target);
  if constexpr (!gradient) return;

  const float scale = a.grad_scale == nullptr ? 1.0F : *a.grad_scale;
  const float inverse = 1.0F / row.sum;
  const float factor = inverse * scale;
  const float of_target = (Exponential<T>::of_difference(at_target, row.m) * inverse - 1.0F) * scale;
  for (int base = thread; base < packs; base += kFlight * kThreads) {
    uint4 raw[kFlight];
#pragma unroll
    for (int f = 0; f < kFlight; ++f) {
      const int i = base + f * kThreads;
      if (i < packs) raw[f] = i < a.kept ? kept[i] : load_raw(logits + static_cast<int64_t>(i) * n);
    }
#pragma unroll
    for (int f = 0; f < kFlight; ++f) {
      const int i = base + f * kThreads;
      if (i >= packs) continue;
      float values[n];
      unpack<T>(raw[f], values);
#pragma unroll
      for (int j = 0; j < n; ++j) values[j] = Exponential<T>::of_difference(values[j], row.m) * factor;
      if (target / n == i) {
#pragma unroll
        for (int j = 0; j < n; ++j) values[j] = target % n == j ? of_target : values[j];
      }
      store_pack(logits + static_cast<int64_t>(i) * n, values);
    }
  }
  for (int64_t i = static_cast<int64_t>(packs) * n + thread; i < a.vocabulary; i += kThreads) {
    const float value = Exponential<T>::of_difference(widen(logits[i]), row.m) * factor;
    logits[i] = narrow<T>(i == target ? of_target : value);
  }
}

template <class T, bool gradient, bool kWhole>
cudaError_t launch(Arguments<T> a, int64_t rows, Stream stream) {
  size_t shared = 0;
  if (gradient && kWhole) {  // the loss alone reads a row once
    int device = 0, limit = 0;
    if (const auto error = cudaGetDevice(&device); error != cudaSuccess) return error;
    if (const auto error = cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device); error != cudaSuccess)
      return error;
    constexpr int kStatic = 1024;  // across_block's own, and what the driver reserves
    a.kept = static_cast<int>(std::min<int64_t>(a.vocabulary / kPack<T>, (limit - 2 * kStatic) / 16));
    shared = static_cast<size_t>(a.kept) * 16;
    const auto error = cudaFuncSetAttribute(row_kernel<T, gradient, kWhole>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            static_cast<int>(shared));
    if (error != cudaSuccess) return error;
  }
  row_kernel<T, gradient, kWhole><<<static_cast<unsigned>(rows), kThreads, shared, stream>>>(a);
  return cudaGetLastError();
}

__global__ void sum_kernel(const float* losses, int64_t rows, float* total) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < rows; i += kThreads) sum += static_cast<double>(losses[i]);
  sum = across_block<Sum>(sum, 0.0);
  if (threadIdx.x == 0) *total = static_cast<float>(sum);
}

/// One block; each round takes kThreads rows, and a warp's ballot and a sum over the warps before it place their entries.
__global__ void compact_kernel(const int64_t* targets, int64_t rows, int64_t count, int64_t* index, int64_t* compact) {
  __shared__ int counts[kThreads / 32];
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  int64_t filled = 0;
  for (int64_t begin = 0; begin < rows; begin += kThreads) {
    const int64_t row = begin + threadIdx.x;
    const int64_t target = row < rows ? targets[row] : -1;
    const unsigned present = __ballot_sync(0xffffffffU, target >= 0);
    if (lane == 0) counts[warp] = __popc(present);
    __syncthreads();
    int before = 0, all = 0;
    for (int w = 0; w < kThreads / 32; ++w) {
      before += w < warp ? counts[w] : 0;
      all += counts[w];
    }
    const int64_t at = filled + before + __popc(present & ((1U << lane) - 1U));
    if (target >= 0 && at < count) {
      index[at] = row;
      compact[at] = target;
    }
    filled += all;
    __syncthreads();
  }
  for (int64_t i = filled + threadIdx.x; i < count; i += kThreads) index[i] = compact[i] = -1;
  if (filled != count && count > 0 && threadIdx.x == 0) compact[0] = INT64_MAX;  // ordered after the loop's last barrier
}

}  // namespace

cudaError_t cross_entropy(Float type, void* logits, int64_t stride, const int64_t* targets, float* losses, const float* grad_scale,
                          bool gradient, int64_t rows, int64_t vocabulary, Stream stream) {
  if (rows == 0) return cudaSuccess;
  return with_type(type, [&]<class T>(T) {
    const Arguments<T> a{static_cast<T*>(logits), stride, targets, losses, grad_scale, vocabulary, 0};
    const bool whole = aligned(a.logits, stride) && vocabulary >= kPack<T>;
    if (gradient) return whole ? launch<T, true, true>(a, rows, stream) : launch<T, true, false>(a, rows, stream);
    return whole ? launch<T, false, true>(a, rows, stream) : launch<T, false, false>(a, rows, stream);
  });
}

cudaError_t sum_losses(const float* losses, int64_t rows, float* total, Stream stream) {
  sum_kernel<<<1, kThreads, 0, stream>>>(losses, rows, total);
  return cudaGetLastError();
}

cudaError_t compact_targets(const int64_t* targets, int64_t rows, int64_t count, int64_t* index, int64_t* compact, Stream stream) {
  compact_kernel<<<1, kThreads, 0, stream>>>(targets, rows, count, index, compact);
  return cudaGetLastError();
}

}  // namespace qlorapp::cuda
