// SPDX-License-Identifier: Apache-2.0
/// Norms, rotations and activations of a pass of one token a row. decode_pass.cu computes it in one launch, wide_pass.cu in several.
#pragma once

#include <cstdint>

#include "decode_pass.hpp"
#include "element.cuh"
#include "pack.cuh"
#include "reduce.cuh"

namespace qlorapp::cuda {
namespace {

using T = __nv_bfloat16;

/// @param value  over the root of the mean square.
__device__ __forceinline__ float normed_by(NormRule rule, float value, float weight) {
  if (rule == NormRule::kRoundTwice) return rounded<T>(rounded<T>(value) * weight);
  return rounded<T>(value * (rule == NormRule::kOnePlus ? weight + 1.0F : weight));
}

template <Activation act>
__device__ __forceinline__ float sigmoid_argument(float g) {
  if constexpr (act == Activation::kSilu) return g;
  else return 1.5957691216057308F * g * (1.0F + 0.044715F * g * g);
}
__device__ __forceinline__ float activated(Activation act, float gate, float up) {
  const float v =
      act == Activation::kSilu ? sigmoid_argument<Activation::kSilu>(gate) : sigmoid_argument<Activation::kGeluTanh>(gate);
  return rounded<T>(gate * __fdividef(1.0F, 1.0F + __expf(-v))) * up;
}

/// How heads are normed and turned: of a PassPhase.
struct HeadRule {
  const float *cos = nullptr, *sin = nullptr;
  int dim = 0, half = 0;
  float eps = 0;
  NormRule norm = NormRule::kRoundTwice;
  bool interleaved = false, turns_before_norm = false;

  __host__ __device__ HeadRule(const DecodePass& pass, const PassPhase& phase)
      : cos(phase.cos),
        sin(phase.sin),
        dim(pass.head_dim),
        half(phase.half),
        eps(phase.eps),
        norm(pass.norm_rule),
        interleaved(phase.interleaved),
        turns_before_norm(phase.turns_before_norm) {}
};

/// A head as attention reads it, by a warp. @param value_of  an element's, which is in bf16.  @param scratch  d floats.  @param to  may lie over
/// scratch.
template <int kDim, class Value>
__device__ __forceinline__ void prepare_head_of(const HeadRule& rule, int lane, const Value& value_of, const void* norm,
                                                int64_t position, float* scratch, T* to) {
  constexpr int kEach = kDim / 32;
  const int dim = rule.dim;
  float v[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) v[i] = lane + 32 * i < dim ? value_of(lane + 32 * i) : 0.0F;
  float cosines[kEach] = {}, sines[kEach] = {};
  const int turned = min(dim, 2 * rule.half);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int e = lane + 32 * i;
    if (e >= turned) break;
    const int64_t angle = position * rule.half + (rule.interleaved ? e / 2 : e < rule.half ? e : e - rule.half);
    cosines[i] = rounded<T>(__ldg(rule.cos + angle)), sines[i] = rounded<T>(__ldg(rule.sin + angle));
  }
  const auto norm_it = [&] {
    if (norm == nullptr) return;
    float squares = 0.0F;
#pragma unroll
    for (int i = 0; i < kEach; ++i) squares += v[i] * v[i];
    const float rstd = rsqrtf(across_warp<Sum>(squares) / static_cast<float>(dim) + rule.eps);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (lane + 32 * i >= dim) break;
      const float weight = to_float(static_cast<const T*>(norm)[lane + 32 * i]);
      v[i] = normed_by(rule.norm, v[i] * rstd, weight);
    }
  };
  const auto turn = [&] {
    const int half = rule.half;
    if (half == 0) return;
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (lane + 32 * i < dim) scratch[lane + 32 * i] = v[i];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int e = lane + 32 * i;
      if (e >= turned) break;
      const bool is_first = rule.interleaved ? e % 2 == 0 : e < half;
      const int other = rule.interleaved ? e ^ 1 : (is_first ? e + half : e - half);
      const float own = rounded<T>(v[i] * cosines[i]), added = rounded<T>(scratch[other] * sines[i]);
      v[i] = rounded<T>(is_first ? own - added : own + added);
    }
    __syncwarp();
  };
  if (rule.turns_before_norm) turn();
  norm_it();
  if (!rule.turns_before_norm) turn();
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    if (lane + 32 * i < dim) to[lane + 32 * i] = from_float<T>(v[i]);
}

}  // namespace
}  // namespace qlorapp::cuda
