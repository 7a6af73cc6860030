// SPDX-License-Identifier: Apache-2.0
#include "rope.hpp"

#include <algorithm>

#include "pack.cuh"

namespace qlorapp::cuda {
namespace {

template <class T>
struct Segment {
  const T* data;
  int64_t token_stride, head_stride;
};

/// Heads [0, first) come from segment 0, [first, second) from segment 1, the rest from segment 2; those from `turned` on are
/// copied as they are.
template <class T>
struct Arguments {
  Segment<T> segment[3];
  int first, second, heads, turned;
  T* y;
  int64_t y_token_stride, y_head_stride;
  const float *cos, *sin;
  const int64_t* position;
  float direction;
  int half, head_dim;
  bool interleaved;
};

template <class T>
__device__ inline const T* source_of(const Arguments<T>& a, int64_t token, int head) {
  const int which = head < a.first ? 0 : head < a.second ? 1 : 2;
  const Segment<T> s = which == 0 ? a.segment[0] : which == 1 ? a.segment[1] : a.segment[2];
  return s.data + token * s.token_stride + (head - (which == 0 ? 0 : which == 1 ? a.first : a.second)) * s.head_stride;
}

template <class T>
__device__ inline void turn(float& x1, float& x2, float c, float s) {
  const float y1 = __fsub_rn(rounded<T>(__fmul_rn(x1, c)), rounded<T>(__fmul_rn(x2, s)));
  const float y2 = __fadd_rn(rounded<T>(__fmul_rn(x2, c)), rounded<T>(__fmul_rn(x1, s)));
  x1 = y1;
  x2 = y2;
}

/// `lanes` threads share a head, 16 bytes of each half a thread; two heads are in flight. In place this is safe: a thread reads
/// both of its packs before it writes them, and nobody else touches them.
template <class T>
__global__ void rope_kernel(const Arguments<T> a) {
  constexpr int n = kPack<T>;
  constexpr int kFlight = 2;
  const int64_t token = blockIdx.x;
  const int lanes = a.half / n;
  const int at = static_cast<int>(threadIdx.x) % lanes * n;
  const int group = static_cast<int>(threadIdx.x) / lanes, groups = static_cast<int>(blockDim.x) / lanes;
  const int64_t row = a.position[token] * a.half + at;
  uint4 low[kFlight], high[kFlight];
  const auto fetch = [&](int base) {
#pragma unroll
    for (int f = 0; f < kFlight; ++f) {
      const int head = base + f * groups;
      if (head >= a.heads) continue;
      const T* source = source_of(a, token, head) + at;
      low[f] = load_raw(source);
      high[f] = load_raw(source + a.half);
    }
  };
  fetch(group);  // before the tables, which wait for the position
  float c[n], s[n];
#pragma unroll
  for (int j = 0; j < n; j += 4) {
    const float4 four_c = *reinterpret_cast<const float4*>(a.cos + row + j);
    const float4 four_s = *reinterpret_cast<const float4*>(a.sin + row + j);
    c[j] = four_c.x, c[j + 1] = four_c.y, c[j + 2] = four_c.z, c[j + 3] = four_c.w;
    s[j] = four_s.x, s[j + 1] = four_s.y, s[j + 2] = four_s.z, s[j + 3] = four_s.w;
  }
#pragma unroll
  for (int j = 0; j < n; ++j) {
    c[j] = rounded<T>(c[j]);
    s[j] = rounded<T>(s[j] * a.direction);
  }
  for (int base = group; base < a.heads; base += kFlight * groups) {
    if (base != group) fetch(base);
#pragma unroll
    for (int f = 0; f < kFlight; ++f) {
      const int head = base + f * groups;
      if (head >= a.heads) continue;
      if (head < a.turned) {
        float x1[n], x2[n];
        unpack<T>(low[f], x1);
        unpack<T>(high[f], x2);
#pragma unroll
        for (int j = 0; j < n; ++j) turn<T>(x1[j], x2[j], c[j], s[j]);
        low[f] = pack<T>(x1);
        high[f] = pack<T>(x2);
      }
      T* target = a.y + token * a.y_token_stride + head * a.y_head_stride + at;
      store_raw(target, low[f]);
      store_raw(target + a.half, high[f]);
    }
  }
  const int rest = (a.head_dim - 2 * a.half) / n;  // packs of a head that do not turn
  if (rest == 0 || a.y == a.segment[0].data) return;
  for (int i = static_cast<int>(threadIdx.x); i < a.heads * rest; i += static_cast<int>(blockDim.x)) {
    const int head = i / rest, from = 2 * a.half + i % rest * n;
    store_raw(a.y + token * a.y_token_stride + head * a.y_head_stride + from, load_raw(source_of(a, token, head) + from));
  }
}

/// Any pairs, head size and alignment.
template <class T>
__global__ void rope_any_kernel(const Arguments<T> a) {
  const int64_t token = blockIdx.x;
  const int64_t row = a.position[token] * a.half;
  const int pairs = a.head_dim / 2;
  for (int i = static_cast<int>(threadIdx.x); i < a.heads * pairs; i += static_cast<int>(blockDim.x)) {
    const int head = i / pairs, at = i % pairs;
    const bool turns = at < a.half, by_halves = turns && !a.interleaved;
    const int first = by_halves ? at : 2 * at, second = by_halves ? at + a.half : first + 1;
    const T* source = source_of(a, token, head);
    float x1 = widen(source[first]), x2 = widen(source[second]);
    if (turns && head < a.turned) turn<T>(x1, x2, rounded<T>(a.cos[row + at]), rounded<T>(a.sin[row + at] * a.direction));
    T* target = a.y + token * a.y_token_stride + head * a.y_head_stride;
    target[first] = narrow<T>(x1);
    target[second] = narrow<T>(x2);
  }
}

template <class T>
cudaError_t launch(const Arguments<T>& a, int64_t tokens, Stream stream) {
  if (tokens == 0 || a.heads == 0 || a.head_dim == 0) return cudaSuccess;
  constexpr int kThreads = 256;
  bool whole = !a.interleaved && a.half > 0 && a.half % kPack<T> == 0 && a.head_dim % kPack<T> == 0 &&
               a.half / kPack<T> <= kThreads && aligned(a.y, a.y_token_stride) && aligned(a.y, a.y_head_stride) && aligned(a.cos) &&
               aligned(a.sin);
  const int counts[3] = {a.first, a.second - a.first, a.heads - a.second};
  for (int i = 0; i < 3; ++i) {
    const Segment<T>& s = a.segment[i];
    if (counts[i] > 0) whole = whole && aligned(s.data, s.token_stride) && aligned(s.data, s.head_stride);
  }
  const auto grid = static_cast<unsigned>(tokens);
  if (whole) {
    const int lanes = a.half / kPack<T>;
    const int groups = std::min((a.heads + 1) / 2, kThreads / lanes);
    rope_kernel<T><<<grid, static_cast<unsigned>(lanes * groups), 0, stream>>>(a);
  } else {
    rope_any_kernel<T><<<grid, kThreads, 0, stream>>>(a);
  }
  return cudaGetLastError();
}

template <class T>
Segment<T> segment_of(const Heads& x) {
  return {static_cast<const T*>(x.data), x.token_stride, x.head_stride};
}

}  // namespace

cudaError_t rope(Float type, Heads x, void* y, int64_t y_token_stride, int64_t y_head_stride, Rotation r, int64_t tokens,
                 int64_t head_dim, Stream stream) {
  return with_type(type, [&]<class T>(T) {
    const int heads = static_cast<int>(x.heads);
    return launch<T>({{segment_of<T>(x), {}, {}},
                      heads,
                      heads,
                      heads,
                      heads,
                      static_cast<T*>(y),
                      y_token_stride,
                      y_head_stride,
                      r.cos,
                      r.sin,
                      r.position,
                      r.inverse ? -1.0F : 1.0F,
                      static_cast<int>(r.half),
                      static_cast<int>(head_dim),
                      r.interleaved},
                     tokens, stream);
  });
}

cudaError_t rope_packed(Float type, Heads q, Heads k, Heads v, void* out, int64_t out_stride, Rotation r, int64_t tokens,
                        int64_t head_dim, Stream stream) {
  return with_type(type, [&]<class T>(T) {
    const int first = static_cast<int>(q.heads), second = first + static_cast<int>(k.heads);
    return launch<T>({{segment_of<T>(q), segment_of<T>(k), segment_of<T>(v)},
                      first,
                      second,
                      second + static_cast<int>(v.heads),
                      second,
                      static_cast<T*>(out),
                      out_stride,
                      head_dim,
                      r.cos,
                      r.sin,
                      r.position,
                      r.inverse ? -1.0F : 1.0F,
                      static_cast<int>(r.half),
                      static_cast<int>(head_dim),
                      r.interleaved},
                     tokens, stream);
  });
}

}  // namespace qlorapp::cuda
