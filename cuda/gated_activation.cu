// SPDX-License-Identifier: Apache-2.0
#include "gated_activation.hpp"

#include <algorithm>

#include "pack.cuh"

namespace qlorapp::cuda {
namespace {

/// e^x as src/ops/cpu/simd.hpp computes it, operation by operation.
__device__ inline float exp_of_cpu(float value) {
  float x = value < -104.0F ? -104.0F : value;
  x = x > 89.0F ? 89.0F : x;
  const float shifted = __fadd_rn(__fmul_rn(x, 0x1.715476p+0F), 0x1.8p23F);
  const float n = __fsub_rn(shifted, 0x1.8p23F);
  const float r = __fsub_rn(__fsub_rn(x, __fmul_rn(n, 0x1.62e4p-1F)), __fmul_rn(n, 0x1.7f7d1cp-20F));
  float p = 1.0F / 5040.0F;
  p = __fadd_rn(__fmul_rn(p, r), 1.0F / 720.0F);
  p = __fadd_rn(__fmul_rn(p, r), 1.0F / 120.0F);
  p = __fadd_rn(__fmul_rn(p, r), 1.0F / 24.0F);
  p = __fadd_rn(__fmul_rn(p, r), 1.0F / 6.0F);
  p = __fadd_rn(__fmul_rn(p, r), 0.5F);
  const float e = __fadd_rn(__fadd_rn(__fmul_rn(p, __fmul_rn(r, r)), r), 1.0F);
  const int k = __float_as_int(shifted) - __float_as_int(0x1.8p23F);
  const int half = k >> 1;
  return __fmul_rn(__fmul_rn(e, __int_as_float((half + 127) << 23)), __int_as_float((k - half + 127) << 23));
}

/// Both activations are g·σ(v): v = g for silu; 2·√(2/π)·(g + 0.044715·g³) for GELU, because 1 + tanh(u) = 2·σ(2·u).
template <Activation act>
__device__ inline float argument(float g) {
  if constexpr (act == Activation::kSilu) return g;
  else return __fmul_rn(__fmul_rn(1.5957691216057308F, g), __fadd_rn(1.0F, __fmul_rn(__fmul_rn(0.044715F, g), g)));
}
/// g·(1 − σ)·dv/dg: what the slope has beside σ.
template <Activation act>
__device__ inline float curve(float g, float sigmoid) {
  const float rest = __fmul_rn(g, __fsub_rn(1.0F, sigmoid));
  if constexpr (act == Activation::kSilu) return rest;
  else return __fmul_rn(rest, __fmul_rn(1.5957691216057308F, __fadd_rn(1.0F, __fmul_rn(__fmul_rn(3 * 0.044715F, g), g))));
}

/// σ(v), and the activation rounded to T.
template <class T, Activation act>
__device__ inline float2 sigmoid_and_active(float g) {
  const float v = argument<act>(g);
  if constexpr (std::is_same_v<T, float>) {
    const float denominator = __fadd_rn(1.0F, exp_of_cpu(-v));
    return {__fdiv_rn(1.0F, denominator), __fdiv_rn(g, denominator)};
  } else {
    const float sigmoid = __fdividef(1.0F, 1.0F + __expf(-v));
    return {sigmoid, rounded<T>(g * sigmoid)};
  }
}

template <class T, Activation act>
__device__ inline float activate(float g, float u) {
  return __fmul_rn(sigmoid_and_active<T, act>(g).y, u);
}

/// g and u become their gradients, d becomes h.
template <class T, Activation act>
__device__ inline void activate_backward(float& d, float& g, float& u) {
  const auto [sigmoid, active] = sigmoid_and_active<T, act>(g);
  const float d_active = rounded<T>(__fmul_rn(d, u));
  const float slope = __fadd_rn(1.0F, curve<act>(g, sigmoid));
  const float h = __fmul_rn(active, u);
  g = __fmul_rn(__fmul_rn(d_active, sigmoid), slope);
  u = __fmul_rn(d, active);
  d = h;
}

template <class T>
struct Arguments {
  T* dh;  // h of the forward pass
  const T* gate_up;
  T* d_gate_up;
  int64_t dh_stride, gate_up_stride, d_gate_up_stride;
  int64_t width;
};

/// A row a blockIdx.x, a pack a thread.
template <class T, Activation act>
__global__ void forward_kernel(const Arguments<T> a) {
  constexpr int n = kPack<T>;
  const int64_t row = blockIdx.x, i = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * n;
  if (i >= a.width) return;
  const T* gate = a.gate_up + row * a.gate_up_stride + i;
  float g[n], u[n];
  load_pack(gate, g);
  load_pack(gate + a.width, u);
#pragma unroll
  for (int j = 0; j < n; ++j) g[j] = activate<T, act>(g[j], u[j]);
  store_pack(a.dh + row * a.dh_stride + i, g);
}

template <class T, bool keep_h, Activation act>
__global__ void backward_kernel(const Arguments<T> a) {
  constexpr int n = kPack<T>;
  const int64_t row = blockIdx.x, i = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * n;
  if (i >= a.width) return;
  const T* gate = a.gate_up + row * a.gate_up_stride + i;
  T *out = a.d_gate_up + row * a.d_gate_up_stride + i, *dh = a.dh + row * a.dh_stride + i;
  float g[n], u[n], d[n];
  load_pack(gate, g);
  load_pack(gate + a.width, u);
  load_pack(dh, d);
#pragma unroll
  for (int j = 0; j < n; ++j) activate_backward<T, act>(d[j], g[j], u[j]);
  store_pack(out, g);
  store_pack(out + a.width, u);
  if constexpr (keep_h) store_pack(dh, d);
}

/// Any width and alignment.
template <class T, Activation act>
__global__ void forward_any_kernel(const Arguments<T> a) {
  const int64_t row = blockIdx.x, step = static_cast<int64_t>(gridDim.y) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x; i < a.width; i += step) {
    const T* gate = a.gate_up + row * a.gate_up_stride + i;
    a.dh[row * a.dh_stride + i] = narrow<T>(activate<T, act>(widen(gate[0]), widen(gate[a.width])));
  }
}

template <class T, bool keep_h, Activation act>
__global__ void backward_any_kernel(const Arguments<T> a) {
  const int64_t row = blockIdx.x, step = static_cast<int64_t>(gridDim.y) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x; i < a.width; i += step) {
    const T* gate = a.gate_up + row * a.gate_up_stride + i;
    T *out = a.d_gate_up + row * a.d_gate_up_stride + i, *dh = a.dh + row * a.dh_stride + i;
    float d = widen(*dh), g = widen(gate[0]), u = widen(gate[a.width]);
    activate_backward<T, act>(d, g, u);
    out[0] = narrow<T>(g);
    out[a.width] = narrow<T>(u);
    if constexpr (keep_h) *dh = narrow<T>(d);
  }
}

constexpr int kThreads = 256;

template <class T>
struct Launch {
  bool whole;
  dim3 grid;
};

template <class F>
cudaError_t with_activation(Activation act, const F& f) {
  return act == Activation::kSilu ? f.template operator()<Activation::kSilu>() : f.template operator()<Activation::kGeluTanh>();
}

template <class T>
Launch<T> launch_of(const Arguments<T>& a, int64_t rows) {
  bool whole = a.width % kPack<T> == 0 && aligned(a.dh, a.dh_stride) && aligned(a.gate_up, a.gate_up_stride);
  if (a.d_gate_up != nullptr) whole = whole && aligned(a.d_gate_up, a.d_gate_up_stride);
  const int64_t items = whole ? a.width / kPack<T> : a.width;
  const int64_t blocks = (items + kThreads - 1) / kThreads;
  whole = whole && blocks <= 65535;
  return {whole, dim3(static_cast<unsigned>(rows), static_cast<unsigned>(std::min<int64_t>(blocks, 65535)))};
}

}  // namespace

cudaError_t gated_activation(Float type, const void* gate_up, int64_t gate_up_stride, void* h, int64_t h_stride, int64_t rows,
                             int64_t width, Activation act, Stream stream) {
  if (rows == 0 || width == 0) return cudaSuccess;
  return with_type(type, [&]<class T>(T) {
    const Arguments<T> a{static_cast<T*>(h), static_cast<const T*>(gate_up), nullptr, h_stride, gate_up_stride, 0, width};
    const Launch<T> launch = launch_of(a, rows);
    return with_activation(act, [&]<Activation known>() {
      if (launch.whole) forward_kernel<T, known><<<launch.grid, kThreads, 0, stream>>>(a);
      else forward_any_kernel<T, known><<<launch.grid, kThreads, 0, stream>>>(a);
      return cudaGetLastError();
    });
  });
}

cudaError_t gated_activation_backward(Float type, void* dh, int64_t dh_stride, const void* gate_up, int64_t gate_up_stride,
                                      void* d_gate_up, int64_t d_gate_up_stride, bool keep_h, int64_t rows, int64_t width,
                                      Activation act, Stream stream) {
  if (rows == 0 || width == 0) return cudaSuccess;
  return with_type(type, [&]<class T>(T) {
    const Arguments<T> a{static_cast<T*>(dh),
                         static_cast<const T*>(gate_up),
                         static_cast<T*>(d_gate_up),
                         dh_stride,
                         gate_up_stride,
                         d_gate_up_stride,
                         width};
    const Launch<T> launch = launch_of(a, rows);
    return with_activation(act, [&]<Activation known>() {
      if (launch.whole && keep_h) backward_kernel<T, true, known><<<launch.grid, kThreads, 0, stream>>>(a);
      else if (launch.whole) backward_kernel<T, false, known><<<launch.grid, kThreads, 0, stream>>>(a);
      else if (keep_h) backward_any_kernel<T, true, known><<<launch.grid, kThreads, 0, stream>>>(a);
      else backward_any_kernel<T, false, known><<<launch.grid, kThreads, 0, stream>>>(a);
      return cudaGetLastError();
    });
  });
}

}  // namespace qlorapp::cuda
