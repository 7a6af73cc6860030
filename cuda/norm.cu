// SPDX-License-Identifier: Apache-2.0
#include "norm.hpp"

#include "pack.cuh"
#include "reduce.cuh"

namespace qlorapp::cuda {
namespace {

template <class T>
struct ForwardArguments {
  const T *x, *residual, *weight;
  T *sum, *y;
  float* rstd;
  int64_t x_stride, residual_stride, sum_stride, y_stride;
  int64_t width;
  float eps;
  float plus;  // 1 where the weight is what is added to 1
};

template <class T>
struct BackwardArguments {
  const T *dy, *x, *weight;
  T *dx, *y;
  const float* rstd;
  int64_t dy_stride, x_stride, dx_stride, y_stride;
  int64_t width;
  float plus;
};

__device__ inline float rstd_of(float squares, int64_t width, float eps) {
  return __frcp_rn(__fsqrt_rn(__fadd_rn(__fdiv_rn(squares, static_cast<float>(width)), eps)));
}

/// kOnce: y is rounded once; else before the product, too.
template <class T, bool kOnce>
__device__ inline float normalized(float x, float rstd, float weight, float plus) {
  if constexpr (kOnce) return __fmul_rn(__fmul_rn(x, rstd), __fadd_rn(weight, plus));
  else return __fmul_rn(rounded<T>(__fmul_rn(x, rstd)), weight);
}
template <class T, bool kOnce>
__device__ inline float weighted(float dy, float weight, float plus) {
  if constexpr (kOnce) return __fmul_rn(dy, __fadd_rn(weight, plus));
  else return rounded<T>(__fmul_rn(dy, weight));
}

/// mean(g·x)·rstd³, the slope of the correction along x.
__device__ inline float slope_of(float dot, int64_t width, float rstd) {
  return __fmul_rn(__fmul_rn(__fmul_rn(__fdiv_rn(dot, static_cast<float>(width)), rstd), rstd), rstd);
}

template <class T, bool accumulate>
__device__ inline float gradient(float g, float x, float rstd, float slope, float before) {
  const float value = __fsub_rn(__fmul_rn(g, rstd), __fmul_rn(slope, x));
  return accumulate ? __fadd_rn(before, rounded<T>(value)) : value;
}

/// How many packs a thread keeps, and how many threads that takes; 0 packs: too wide for registers.
struct Plan {
  int packs, threads;
};
/// Threads of a row's block, so that the compiler knows how many registers each may have.
template <int kPacks>
constexpr int kMostThreads = kPacks == 1   ? 128
                             : kPacks == 2 ? 256
                                           : 512;

/// A block a row; each thread keeps kPacks times 16 bytes of it.
template <class T, int kPacks, bool add, bool kOnce>
__global__ void __launch_bounds__(kMostThreads<kPacks>) forward_kernel(const ForwardArguments<T> a) {
  constexpr int n = kPack<T>;
  const int64_t row = blockIdx.x;
  const int packs = static_cast<int>(a.width / n);
  uint4 kept[kPacks], other[kPacks], weight[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int i = static_cast<int>(threadIdx.x + p * blockDim.x);
    if (i >= packs) continue;
    kept[p] = load_raw(a.x + row * a.x_stride + i * n);
    if constexpr (add) other[p] = load_raw(a.residual + row * a.residual_stride + i * n);
    weight[p] = load_raw(a.weight + i * n);
  }
  float squares = 0;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int i = static_cast<int>(threadIdx.x + p * blockDim.x);
    if (i >= packs) continue;
    float x[n];
    unpack<T>(kept[p], x);
    if constexpr (add) {
      float r[n];
      unpack<T>(other[p], r);
#pragma unroll
      for (int j = 0; j < n; ++j) x[j] = __fadd_rn(x[j], r[j]);
      kept[p] = pack<T>(x);
      store_raw(a.sum + row * a.sum_stride + i * n, kept[p]);
      unpack<T>(kept[p], x);
    }
#pragma unroll
    for (int j = 0; j < n; ++j) squares = fmaf(x[j], x[j], squares);
  }
  const float rstd = rstd_of(across_block<Sum>(squares, 0.0F), a.width, a.eps);
  if (threadIdx.x == 0) a.rstd[row] = rstd;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int i = static_cast<int>(threadIdx.x + p * blockDim.x);
    if (i >= packs) continue;
    float x[n], w[n];
    unpack<T>(kept[p], x);
    unpack<T>(weight[p], w);
#pragma unroll
    for (int j = 0; j < n; ++j) x[j] = normalized<T, kOnce>(x[j], rstd, w[j], a.plus);
    store_pack(a.y + row * a.y_stride + i * n, x);
  }
}

/// Any width and alignment; a thread meets the same elements in both passes.
template <class T, bool add, bool kOnce>
__global__ void forward_any_kernel(const ForwardArguments<T> a) {
  const int64_t row = blockIdx.x;
  const T* source = a.x + row * a.x_stride;
  float squares = 0;
  for (int64_t i = threadIdx.x; i < a.width; i += blockDim.x) {
    float x = widen(source[i]);
    if constexpr (add) {
      const T total = narrow<T>(__fadd_rn(x, widen(a.residual[row * a.residual_stride + i])));
      a.sum[row * a.sum_stride + i] = total;
      x = widen(total);
    }
    squares = fmaf(x, x, squares);
  }
  const float rstd = rstd_of(across_block<Sum>(squares, 0.0F), a.width, a.eps);
  if (threadIdx.x == 0) a.rstd[row] = rstd;
  const T* again = add ? a.sum + row * a.sum_stride : source;
  for (int64_t i = threadIdx.x; i < a.width; i += blockDim.x)
    a.y[row * a.y_stride + i] = narrow<T>(normalized<T, kOnce>(widen(again[i]), rstd, widen(a.weight[i]), a.plus));
}

template <class T, int kPacks, bool accumulate, bool kOnce>
__global__ void __launch_bounds__(kMostThreads<kPacks>) backward_kernel(const BackwardArguments<T> a) {
  constexpr int n = kPack<T>;
  const int64_t row = blockIdx.x;
  const int packs = static_cast<int>(a.width / n);
  const float rstd = a.rstd[row];
  uint4 kept[kPacks], raw[kPacks], before[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int i = static_cast<int>(threadIdx.x + p * blockDim.x);
    if (i >= packs) continue;
    raw[p] = load_raw(a.dy + row * a.dy_stride + i * n);
    kept[p] = load_raw(a.x + row * a.x_stride + i * n);
    if constexpr (accumulate) before[p] = load_raw(a.dx + row * a.dx_stride + i * n);
  }
  float dot = 0;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int i = static_cast<int>(threadIdx.x + p * blockDim.x);
    if (i >= packs) continue;
    float g[n], x[n], w[n];
    unpack<T>(raw[p], g);
    unpack<T>(kept[p], x);
    load_pack(a.weight + i * n, w);
#pragma unroll
    for (int j = 0; j < n; ++j) g[j] = kOnce ? weighted<T, kOnce>(g[j], w[j], a.plus) : __fmul_rn(g[j], w[j]);
    if constexpr (!kOnce) {
      raw[p] = pack<T>(g);  // rounds
      unpack<T>(raw[p], g);
    }
#pragma unroll
    for (int j = 0; j < n; ++j) dot = fmaf(g[j], x[j], dot);
  }
  const float slope = slope_of(across_block<Sum>(dot, 0.0F), a.width, rstd);
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int i = static_cast<int>(threadIdx.x + p * blockDim.x);
    if (i >= packs) continue;
    float g[n], x[n], d[n];
    unpack<T>(raw[p], g);
    if constexpr (kOnce) {  // in more digits than raw has room for
      float w[n];
      load_pack(a.weight + i * n, w);
#pragma unroll
      for (int j = 0; j < n; ++j) g[j] = weighted<T, kOnce>(g[j], w[j], a.plus);
    }
    unpack<T>(kept[p], x);
    if constexpr (accumulate) unpack<T>(before[p], d);
#pragma unroll
    for (int j = 0; j < n; ++j) d[j] = gradient<T, accumulate>(g[j], x[j], rstd, slope, accumulate ? d[j] : 0.0F);
    store_pack(a.dx + row * a.dx_stride + i * n, d);
    if constexpr (accumulate) {  // y may lie where dy did: this thread alone read these elements, and keeps them
      float w[n];
      load_pack(a.weight + i * n, w);
#pragma unroll
      for (int j = 0; j < n; ++j) x[j] = normalized<T, kOnce>(x[j], rstd, w[j], a.plus);
      store_pack(a.y + row * a.y_stride + i * n, x);
    }
  }
}

template <class T, bool accumulate, bool kOnce>
__global__ void backward_any_kernel(const BackwardArguments<T> a) {
  const int64_t row = blockIdx.x;
  const float rstd = a.rstd[row];
  const T *dy = a.dy + row * a.dy_stride, *x = a.x + row * a.x_stride;
  T* dx = a.dx + row * a.dx_stride;
  float dot = 0;
  for (int64_t i = threadIdx.x; i < a.width; i += blockDim.x)
    dot = fmaf(weighted<T, kOnce>(widen(dy[i]), widen(a.weight[i]), a.plus), widen(x[i]), dot);
  const float slope = slope_of(across_block<Sum>(dot, 0.0F), a.width, rstd);
  for (int64_t i = threadIdx.x; i < a.width; i += blockDim.x) {
    const float g = weighted<T, kOnce>(widen(dy[i]), widen(a.weight[i]), a.plus);
    dx[i] = narrow<T>(gradient<T, accumulate>(g, widen(x[i]), rstd, slope, accumulate ? widen(dx[i]) : 0.0F));
    if constexpr (accumulate)
      a.y[row * a.y_stride + i] = narrow<T>(normalized<T, kOnce>(widen(x[i]), rstd, widen(a.weight[i]), a.plus));
  }
}

constexpr int kAnyThreads = 256;

Plan plan_of(int64_t packs) {
  const int each = packs <= 128 ? 1 : packs <= 512 ? 2 : 4;
  const int64_t threads = (packs + each - 1) / each;
  if (threads > kMostThreads<4>) return {0, 0};
  return {each, static_cast<int>((threads + 31) / 32 * 32)};
}

template <class T, bool add, bool kOnce>
cudaError_t forward(const ForwardArguments<T>& a, int64_t rows, Stream stream) {
  if (rows == 0 || a.width == 0) return cudaSuccess;
  const auto grid = static_cast<unsigned>(rows);
  const bool whole = a.width % kPack<T> == 0 && aligned(a.x, a.x_stride) && aligned(a.weight) && aligned(a.y, a.y_stride) &&
                     (!add || (aligned(a.residual, a.residual_stride) && aligned(a.sum, a.sum_stride)));
  const Plan plan = whole ? plan_of(a.width / kPack<T>) : Plan{0, 0};
  const auto threads = static_cast<unsigned>(plan.threads);
  if (plan.packs == 1) forward_kernel<T, 1, add, kOnce><<<grid, threads, 0, stream>>>(a);
  else if (plan.packs == 2) forward_kernel<T, 2, add, kOnce><<<grid, threads, 0, stream>>>(a);
  else if (plan.packs == 4) forward_kernel<T, 4, add, kOnce><<<grid, threads, 0, stream>>>(a);
  else forward_any_kernel<T, add, kOnce><<<grid, kAnyThreads, 0, stream>>>(a);
  return cudaGetLastError();
}

template <class T, bool accumulate, bool kOnce>
cudaError_t backward(const BackwardArguments<T>& a, int64_t rows, Stream stream) {
  if (rows == 0 || a.width == 0) return cudaSuccess;
  const auto grid = static_cast<unsigned>(rows);
  const bool whole = a.width % kPack<T> == 0 && aligned(a.dy, a.dy_stride) && aligned(a.x, a.x_stride) && aligned(a.weight) &&
                     aligned(a.dx, a.dx_stride) && (!accumulate || aligned(a.y, a.y_stride));
  const Plan plan = whole ? plan_of(a.width / kPack<T>) : Plan{0, 0};
  const auto threads = static_cast<unsigned>(plan.threads);
  if (plan.packs == 1) backward_kernel<T, 1, accumulate, kOnce><<<grid, threads, 0, stream>>>(a);
  else if (plan.packs == 2) backward_kernel<T, 2, accumulate, kOnce><<<grid, threads, 0, stream>>>(a);
  else if (plan.packs == 4) backward_kernel<T, 4, accumulate, kOnce><<<grid, threads, 0, stream>>>(a);
  else backward_any_kernel<T, accumulate, kOnce><<<grid, kAnyThreads, 0, stream>>>(a);
  return cudaGetLastError();
}

float plus_of(NormRule rule) { return rule == NormRule::kOnePlus ? 1.0F : 0.0F; }

}  // namespace

cudaError_t rms_norm(Float type, Rows x, const void* weight, WrittenRows y, float* rstd, int64_t rows, int64_t width, float eps,
                     NormRule rule, Stream stream) {
  return with_type(type, [&]<class T>(T) {
    const ForwardArguments<T> a{static_cast<const T*>(x.data),
                                nullptr,
                                static_cast<const T*>(weight),
                                nullptr,
                                static_cast<T*>(y.data),
                                rstd,
                                x.stride,
                                0,
                                0,
                                y.stride,
                                width,
                                eps,
                                plus_of(rule)};
    return rule == NormRule::kRoundTwice ? forward<T, false, false>(a, rows, stream) : forward<T, false, true>(a, rows, stream);
  });
}

cudaError_t add_rms_norm(Float type, Rows x, Rows residual, const void* weight, WrittenRows sum, WrittenRows y, float* rstd,
                         int64_t rows, int64_t width, float eps, NormRule rule, Stream stream) {
  return with_type(type, [&]<class T>(T) {
    const ForwardArguments<T> a{static_cast<const T*>(x.data),
                                static_cast<const T*>(residual.data),
                                static_cast<const T*>(weight),
                                static_cast<T*>(sum.data),
                                static_cast<T*>(y.data),
                                rstd,
                                x.stride,
                                residual.stride,
                                sum.stride,
                                y.stride,
                                width,
                                eps,
                                plus_of(rule)};
    return rule == NormRule::kRoundTwice ? forward<T, true, false>(a, rows, stream) : forward<T, true, true>(a, rows, stream);
  });
}

cudaError_t rms_norm_backward(Float type, Rows dy, Rows x, const void* weight, const float* rstd, WrittenRows dx, WrittenRows y,
                              bool accumulate, int64_t rows, int64_t width, NormRule rule, Stream stream) {
  return with_type(type, [&]<class T>(T) {
    const BackwardArguments<T> a{static_cast<const T*>(dy.data),
                                 static_cast<const T*>(x.data),
                                 static_cast<const T*>(weight),
                                 static_cast<T*>(dx.data),
                                 static_cast<T*>(y.data),
                                 rstd,
                                 dy.stride,
                                 x.stride,
                                 dx.stride,
                                 y.stride,
                                 width,
                                 plus_of(rule)};
    if (rule == NormRule::kRoundTwice)
      return accumulate ? backward<T, true, false>(a, rows, stream) : backward<T, false, false>(a, rows, stream);
    return accumulate ? backward<T, true, true>(a, rows, stream) : backward<T, false, true>(a, rows, stream);
  });
}

}  // namespace qlorapp::cuda
