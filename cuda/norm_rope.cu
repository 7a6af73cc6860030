// SPDX-License-Identifier: Apache-2.0
#include "norm_rope.hpp"

#include "pack.cuh"
#include "reduce.cuh"

namespace qlorapp::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kMostEach = 8;  // elements of each half that a lane keeps: heads up to 512 wide

/// Heads of a tensor.
template <class T>
struct Part {
  const T* data;
  int64_t token_stride, head_stride;

  explicit Part(const Heads& x) : data(static_cast<const T*>(x.data)), token_stride(x.token_stride), head_stride(x.head_stride) {}
  __device__ const T* of(int64_t token, int head) const { return data + token * token_stride + head * head_stride; }
  /// Whether n neighbors can be read at once.
  [[nodiscard]] bool in_step(int n) const {
    return reinterpret_cast<uintptr_t>(data) % (n * sizeof(T)) == 0 && token_stride % n == 0 && head_stride % n == 0;
  }
};

template <class T>
struct Arguments {
  Part<T> x, dq, dk, dv;  // the gradients: of a backward pass
  T* y;
  int64_t y_token_stride;
  const T *q_weight, *k_weight;
  const float *cos, *sin;
  const int64_t* position;
  int q_heads, heads, v_heads, half;  // heads: of q and k
  float eps, plus;
};

/// kOnce: a normed element is rounded once, and plus is what is added to its weight; else before the product, too.
template <class T, bool kOnce>
__device__ inline float normalized(float x, float rstd, float weight, float plus) {
  if constexpr (kOnce) return rounded<T>(__fmul_rn(__fmul_rn(x, rstd), __fadd_rn(weight, plus)));
  else return rounded<T>(__fmul_rn(rounded<T>(__fmul_rn(x, rstd)), weight));
}
template <class T, bool kOnce>
__device__ inline float weighted(float d, float weight, float plus) {
  if constexpr (kOnce) return __fmul_rn(d, __fadd_rn(weight, plus));
  else return rounded<T>(__fmul_rn(d, weight));
}

/// The two halves of a head, spread over a warp: n neighbors of each a lane, or n elements 32 apart where those are not to be had.
template <class T, int n, bool kTogether>
struct Halves {
  float low[n], high[n];

  __device__ static int place(int j) {
    const int lane = static_cast<int>(threadIdx.x);
    return kTogether ? lane * n + j : lane + 32 * j;
  }
  template <class Source>
  __device__ static void read(const Source* source, int half, float (&values)[n]) {
    if constexpr (kTogether) {
      struct alignas(sizeof(Source) * n) Neighbors {
        Source values[n];
      };
      const Neighbors all = *reinterpret_cast<const Neighbors*>(source + place(0));
#pragma unroll
      for (int j = 0; j < n; ++j) values[j] = widen(all.values[j]);
    } else {
#pragma unroll
      for (int j = 0; j < n; ++j) values[j] = place(j) < half ? widen(source[place(j)]) : 0.0F;
    }
  }
  __device__ static void write(T* target, int half, const float (&values)[n]) {
    if constexpr (kTogether) {
      struct alignas(sizeof(T) * n) Neighbors {
        T values[n];
      };
      Neighbors all;
#pragma unroll
      for (int j = 0; j < n; ++j) all.values[j] = narrow<T>(values[j]);
      *reinterpret_cast<Neighbors*>(target + place(0)) = all;
    } else {
#pragma unroll
      for (int j = 0; j < n; ++j) {
        if (place(j) < half) target[place(j)] = narrow<T>(values[j]);
      }
    }
  }
  __device__ void load(const T* head, int half) {
    read(head, half, low);
    read(head + half, half, high);
  }
  __device__ void store(T* head, int half) const {
    write(head, half, low);
    write(head + half, half, high);
  }
  /// Σ low·other.low + high·other.high over the warp.
  __device__ float dot(const Halves& other) const {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < n; ++j) sum = fmaf(high[j], other.high[j], fmaf(low[j], other.low[j], sum));
    return across_warp<Sum>(sum);
  }
  /// By the angles whose cosines and sines, rounded to T, are `low` and `high` of `angles`. @param direction  -1: back.
  __device__ void turn(const Halves& angles, float direction) {
#pragma unroll
    for (int j = 0; j < n; ++j) {
      const float c = angles.low[j], s = direction * angles.high[j];
      const float y1 = __fsub_rn(rounded<T>(__fmul_rn(low[j], c)), rounded<T>(__fmul_rn(high[j], s)));
      const float y2 = __fadd_rn(rounded<T>(__fmul_rn(high[j], c)), rounded<T>(__fmul_rn(low[j], s)));
      low[j] = rounded<T>(y1);
      high[j] = rounded<T>(y2);
    }
  }
};

template <class T, int n, bool kTogether>
__device__ inline Halves<T, n, kTogether> angles_of(const Arguments<T>& a, int64_t token) {
  using Angles = Halves<T, n, kTogether>;
  Angles angles;
  const int64_t row = a.position[token] * a.half;
  Angles::read(a.cos + row, a.half, angles.low);
  Angles::read(a.sin + row, a.half, angles.high);
#pragma unroll
  for (int j = 0; j < n; ++j) {
    angles.low[j] = rounded<T>(angles.low[j]);
    angles.high[j] = rounded<T>(angles.high[j]);
  }
  return angles;
}

__device__ inline float rstd_of(float squares, int half, float eps) {
  return __frcp_rn(__fsqrt_rn(__fadd_rn(__fdiv_rn(squares, static_cast<float>(2 * half)), eps)));
}

/// A block a token, a warp a head at a time: blockDim (32, kWarps).
template <class T, int n, bool kTogether, bool kOnce>
__global__ void forward_kernel(const Arguments<T> a) {
  const int64_t token = blockIdx.x;
  const auto angles = angles_of<T, n, kTogether>(a, token);
  for (int head = static_cast<int>(threadIdx.y); head < a.heads; head += kWarps) {
    Halves<T, n, kTogether> x, w;
    x.load(a.x.of(token, head), a.half);
    w.load(head < a.q_heads ? a.q_weight : a.k_weight, a.half);
    const float rstd = rstd_of(x.dot(x), a.half, a.eps);
#pragma unroll
    for (int j = 0; j < n; ++j) {
      x.low[j] = normalized<T, kOnce>(x.low[j], rstd, w.low[j], a.plus);
      x.high[j] = normalized<T, kOnce>(x.high[j], rstd, w.high[j], a.plus);
    }
    x.turn(angles, 1.0F);
    x.store(a.y + token * a.y_token_stride + static_cast<int64_t>(head) * 2 * a.half, a.half);
  }
}

template <class T, int n, bool kTogether, bool kOnce>
__global__ void backward_kernel(const Arguments<T> a) {
  const int64_t token = blockIdx.x;
  const auto angles = angles_of<T, n, kTogether>(a, token);
  for (int head = static_cast<int>(threadIdx.y); head < a.heads + a.v_heads; head += kWarps) {
    T* const out = a.y + token * a.y_token_stride + static_cast<int64_t>(head) * 2 * a.half;
    Halves<T, n, kTogether> d, x, w;
    if (head >= a.heads) {
      d.load(a.dv.of(token, head - a.heads), a.half);
      d.store(out, a.half);
      continue;
    }
    const bool is_query = head < a.q_heads;
    d.load(is_query ? a.dq.of(token, head) : a.dk.of(token, head - a.q_heads), a.half);
    x.load(a.x.of(token, head), a.half);
    w.load(is_query ? a.q_weight : a.k_weight, a.half);
    d.turn(angles, -1.0F);
    const float rstd = rstd_of(x.dot(x), a.half, a.eps);
#pragma unroll
    for (int j = 0; j < n; ++j) {
      d.low[j] = weighted<T, kOnce>(d.low[j], w.low[j], a.plus);
      d.high[j] = weighted<T, kOnce>(d.high[j], w.high[j], a.plus);
    }
    const float mean = __fdiv_rn(d.dot(x), static_cast<float>(2 * a.half));
    const float slope = __fmul_rn(__fmul_rn(__fmul_rn(mean, rstd), rstd), rstd);
#pragma unroll
    for (int j = 0; j < n; ++j) {
      d.low[j] = __fsub_rn(__fmul_rn(d.low[j], rstd), __fmul_rn(slope, x.low[j]));
      d.high[j] = __fsub_rn(__fmul_rn(d.high[j], rstd), __fmul_rn(slope, x.high[j]));
    }
    d.store(out, a.half);
  }
}

template <class T, int n, bool kTogether, bool backward>
void start(const Arguments<T>& a, bool once, int64_t tokens, Stream stream) {
  const dim3 block(32, kWarps);
  const auto grid = static_cast<unsigned>(tokens);
  if constexpr (backward) {
    if (once) backward_kernel<T, n, kTogether, true><<<grid, block, 0, stream>>>(a);
    else backward_kernel<T, n, kTogether, false><<<grid, block, 0, stream>>>(a);
  } else {
    if (once) forward_kernel<T, n, kTogether, true><<<grid, block, 0, stream>>>(a);
    else forward_kernel<T, n, kTogether, false><<<grid, block, 0, stream>>>(a);
  }
}

template <class T, bool backward>
cudaError_t launch(const Arguments<T>& a, NormRule rule, int64_t tokens, Stream stream) {
  if (tokens == 0 || a.heads == 0 || a.half == 0) return cudaSuccess;
  if (a.half > 32 * kMostEach) return cudaErrorInvalidValue;
  const bool once = rule != NormRule::kRoundTwice;
  const auto in_step = [&](int n) {
    const auto fits = [&](const void* data, size_t size) { return reinterpret_cast<uintptr_t>(data) % (n * size) == 0; };
    return a.half == 32 * n && a.x.in_step(n) && a.dq.in_step(n) && a.dk.in_step(n) && a.dv.in_step(n) && fits(a.y, sizeof(T)) &&
           a.y_token_stride % n == 0 && fits(a.q_weight, sizeof(T)) && fits(a.k_weight, sizeof(T)) && fits(a.cos, sizeof(float)) &&
           fits(a.sin, sizeof(float));
  };
  if (in_step(1)) start<T, 1, true, backward>(a, once, tokens, stream);
  else if (in_step(2)) start<T, 2, true, backward>(a, once, tokens, stream);
  else if (in_step(4)) start<T, 4, true, backward>(a, once, tokens, stream);
  else start<T, kMostEach, false, backward>(a, once, tokens, stream);
  return cudaGetLastError();
}

template <class T>
Arguments<T> arguments_of(const Heads& x, const Heads& dq, const Heads& dk, const Heads& dv, void* y, int64_t y_token_stride,
                          const HeadNorm& norm, const Rotation& r, int64_t half) {
  return {Part<T>(x),
          Part<T>(dq),
          Part<T>(dk),
          Part<T>(dv),
          static_cast<T*>(y),
          y_token_stride,
          static_cast<const T*>(norm.q_weight),
          static_cast<const T*>(norm.k_weight),
          r.cos,
          r.sin,
          r.position,
          static_cast<int>(norm.q_heads),
          static_cast<int>(x.heads),
          static_cast<int>(dv.heads),
          static_cast<int>(half),
          norm.eps,
          norm.rule == NormRule::kOnePlus ? 1.0F : 0.0F};
}

}  // namespace

cudaError_t rms_norm_rope(Float type, Heads x, void* y, HeadNorm norm, Rotation rotation, int64_t tokens, int64_t half,
                          Stream stream) {
  return with_type(type, [&]<class T>(T) {
    return launch<T, false>(arguments_of<T>(x, {}, {}, {}, y, x.heads * 2 * half, norm, rotation, half), norm.rule, tokens, stream);
  });
}

cudaError_t rms_norm_rope_backward(Float type, Heads dq, Heads dk, Heads dv, Heads x, void* out, int64_t out_stride, HeadNorm norm,
                                   Rotation rotation, int64_t tokens, int64_t half, Stream stream) {
  return with_type(type, [&]<class T>(T) {
    return launch<T, true>(arguments_of<T>(x, dq, dk, dv, out, out_stride, norm, rotation, half), norm.rule, tokens, stream);
  });
}

}  // namespace qlorapp::cuda
