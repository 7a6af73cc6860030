// SPDX-License-Identifier: Apache-2.0
#include "norm_rope.hpp"

#include "pack.cuh"
#include "reduce.cuh"

namespace qlorapp::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kMostEach = 8;  // elements of each half that a lane keeps: heads up to 512 wide

template <class T>
struct Arguments {
  const T* x;
  int64_t x_token_stride, x_head_stride;
  T* y;
  int64_t y_token_stride;
  const T *q_weight, *k_weight;
  const float *cos, *sin;
  const int64_t* position;
  int heads, q_heads, half;
  float eps, plus;
};

template <class T, bool kOnce>
__device__ inline float normalized(float x, float rstd, float weight, float plus) {
  if constexpr (kOnce) return __fmul_rn(__fmul_rn(x, rstd), __fadd_rn(weight, plus));
  else return rounded<T>(__fmul_rn(rounded<T>(__fmul_rn(x, rstd)), weight));
}

/// n neighbors a lane in each half, or n elements 32 apart where a half has no 32·n.
template <int n, bool kTogether>
__device__ inline int place_of(int j) {
  const int lane = static_cast<int>(threadIdx.x);
  return kTogether ? lane * n + j : lane + 32 * j;
}

template <class T, int n, bool kTogether>
__device__ inline void load(const T* source, int half, float (&low)[n], float (&high)[n]) {
#pragma unroll
  for (int j = 0; j < n; ++j) {
    const int i = place_of<n, kTogether>(j);
    const bool there = kTogether || i < half;
    low[j] = there ? widen(source[i]) : 0.0F;
    high[j] = there ? widen(source[i + half]) : 0.0F;
  }
}

template <int n>
__device__ inline float rstd_of(const float (&low)[n], const float (&high)[n], int half, float eps) {
  float squares = 0;
#pragma unroll
  for (int j = 0; j < n; ++j) squares = fmaf(high[j], high[j], fmaf(low[j], low[j], squares));
  squares = across_warp<Sum>(squares);
  return __frcp_rn(__fsqrt_rn(__fadd_rn(__fdiv_rn(squares, static_cast<float>(2 * half)), eps)));
}

/// A block a token, blockDim (32, kWarps).
template <class T, int n, bool kTogether, bool kOnce>
__global__ void forward_kernel(const Arguments<T> a) {
  const int64_t token = blockIdx.x, row = a.position[token] * a.half;
  float c[n], s[n];
#pragma unroll
  for (int j = 0; j < n; ++j) {
    const int i = place_of<n, kTogether>(j);
    const bool there = kTogether || i < a.half;
    c[j] = there ? rounded<T>(a.cos[row + i]) : 0.0F;
    s[j] = there ? rounded<T>(a.sin[row + i]) : 0.0F;
  }
  for (int head = static_cast<int>(threadIdx.y); head < a.heads; head += kWarps) {
    const T* const weight = head < a.q_heads ? a.q_weight : a.k_weight;
    float low[n], high[n], w_low[n], w_high[n];
    load<T, n, kTogether>(a.x + token * a.x_token_stride + head * a.x_head_stride, a.half, low, high);
    load<T, n, kTogether>(weight, a.half, w_low, w_high);
    const float rstd = rstd_of(low, high, a.half, a.eps);
    T* const y = a.y + token * a.y_token_stride + static_cast<int64_t>(head) * 2 * a.half;
#pragma unroll
    for (int j = 0; j < n; ++j) {
      const int i = place_of<n, kTogether>(j);
      if (!kTogether && i >= a.half) continue;
      const float x1 = rounded<T>(normalized<T, kOnce>(low[j], rstd, w_low[j], a.plus));
      const float x2 = rounded<T>(normalized<T, kOnce>(high[j], rstd, w_high[j], a.plus));
      y[i] = narrow<T>(__fsub_rn(rounded<T>(__fmul_rn(x1, c[j])), rounded<T>(__fmul_rn(x2, s[j]))));
      y[i + a.half] = narrow<T>(__fadd_rn(rounded<T>(__fmul_rn(x2, c[j])), rounded<T>(__fmul_rn(x1, s[j]))));
    }
  }
}

template <class T, int n, bool kTogether, bool kOnce>
__global__ void backward_kernel(const Arguments<T> a) {
  const int64_t token = blockIdx.x;
  const auto weighted = [&](float d, float w) {
    if constexpr (kOnce) return __fmul_rn(d, __fadd_rn(w, a.plus));
    else return rounded<T>(__fmul_rn(d, w));
  };
  for (int head = static_cast<int>(threadIdx.y); head < a.heads; head += kWarps) {
    const T* const weight = head < a.q_heads ? a.q_weight : a.k_weight;
    T* const d = a.y + token * a.y_token_stride + static_cast<int64_t>(head) * 2 * a.half;
    float low[n], high[n], w_low[n], w_high[n], d_low[n], d_high[n];
    load<T, n, kTogether>(a.x + token * a.x_token_stride + head * a.x_head_stride, a.half, low, high);
    load<T, n, kTogether>(weight, a.half, w_low, w_high);
    load<T, n, kTogether>(d, a.half, d_low, d_high);
    const float rstd = rstd_of(low, high, a.half, a.eps);
    float dot = 0;
#pragma unroll
    for (int j = 0; j < n; ++j) {
      d_low[j] = weighted(d_low[j], w_low[j]);
      d_high[j] = weighted(d_high[j], w_high[j]);
      dot = fmaf(d_high[j], high[j], fmaf(d_low[j], low[j], dot));
    }
    dot = across_warp<Sum>(dot);
    const float slope =
        __fmul_rn(__fmul_rn(__fmul_rn(__fdiv_rn(dot, static_cast<float>(2 * a.half)), rstd), rstd), rstd);
#pragma unroll
    for (int j = 0; j < n; ++j) {
      const int i = place_of<n, kTogether>(j);
      if (!kTogether && i >= a.half) continue;
      d[i] = narrow<T>(__fsub_rn(__fmul_rn(d_low[j], rstd), __fmul_rn(slope, low[j])));
      d[i + a.half] = narrow<T>(__fsub_rn(__fmul_rn(d_high[j], rstd), __fmul_rn(slope, high[j])));
    }
  }
}

/// f.operator()<n, kTogether>() for the width of a head.
template <class F>
cudaError_t with_width(int64_t half, const F& f) {
  switch (half) {
    case 32:
      return f.template operator()<1, true>();
    case 64:
      return f.template operator()<2, true>();
    case 128:
      return f.template operator()<4, true>();
    default:
      return half <= 32 * kMostEach ? f.template operator()<kMostEach, false>() : cudaErrorInvalidValue;
  }
}

template <class T, bool backward>
cudaError_t launch(const Arguments<T>& a, NormRule rule, int64_t tokens, Stream stream) {
  if (tokens == 0 || a.heads == 0 || a.half == 0) return cudaSuccess;
  const dim3 block(32, kWarps);
  const auto grid = static_cast<unsigned>(tokens);
  return with_width(a.half, [&]<int n, bool kTogether>() {
    const bool once = rule != NormRule::kRoundTwice;
    if constexpr (backward) {
      if (once) backward_kernel<T, n, kTogether, true><<<grid, block, 0, stream>>>(a);
      else backward_kernel<T, n, kTogether, false><<<grid, block, 0, stream>>>(a);
    } else {
      if (once) forward_kernel<T, n, kTogether, true><<<grid, block, 0, stream>>>(a);
      else forward_kernel<T, n, kTogether, false><<<grid, block, 0, stream>>>(a);
    }
    return cudaGetLastError();
  });
}

template <class T>
Arguments<T> arguments_of(const Heads& x, void* y, int64_t y_token_stride, const HeadNorm& norm, const Rotation& r, int64_t half) {
  return {static_cast<const T*>(x.data),
          x.token_stride,
          x.head_stride,
          static_cast<T*>(y),
          y_token_stride,
          static_cast<const T*>(norm.q_weight),
          static_cast<const T*>(norm.k_weight),
          r.cos,
          r.sin,
          r.position,
          static_cast<int>(x.heads),
          static_cast<int>(norm.q_heads),
          static_cast<int>(half),
          norm.eps,
          norm.rule == NormRule::kOnePlus ? 1.0F : 0.0F};
}

}  // namespace

cudaError_t rms_norm_rope(Float type, Heads x, void* y, HeadNorm norm, Rotation rotation, int64_t tokens, int64_t half,
                          Stream stream) {
  return with_type(type, [&]<class T>(T) {
    return launch<T, false>(arguments_of<T>(x, y, x.heads * 2 * half, norm, rotation, half), norm.rule, tokens, stream);
  });
}

cudaError_t head_norm_backward(Float type, Heads x, void* d, int64_t d_stride, HeadNorm norm, int64_t tokens, int64_t half,
                               Stream stream) {
  return with_type(type, [&]<class T>(T) {
    return launch<T, true>(arguments_of<T>(x, d, d_stride, norm, {}, half), norm.rule, tokens, stream);
  });
}

}  // namespace qlorapp::cuda
