// SPDX-License-Identifier: Apache-2.0
#include "adamw.hpp"

#include <algorithm>

#include "pack.cuh"

namespace qlorapp::cuda {
namespace {

constexpr int kThreads = 256;

struct Arguments {
  float* parameter;
  const float* gradient;
  float *exp_avg, *exp_avg_sq;
  int64_t n;
  AdamWStep step;
};

/// ATen's lerp_: from the nearer end, contracted.
__device__ inline float lerp(float from, float to, float weight) {
  const float distance = __fsub_rn(to, from);
  return weight < 0.5F ? __fmaf_rn(weight, distance, from) : __fmaf_rn(__fsub_rn(weight, 1.0F), distance, to);
}

__device__ inline void update(float& p, float g, float& m, float& v, const AdamWStep& s) {
  p = __fmul_rn(p, s.decay);
  m = lerp(m, g, s.one_minus_beta1);
  v = __fmaf_rn(__fmul_rn(s.one_minus_beta2, g), g, __fmul_rn(v, s.beta2));
  const float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), s.correction2), s.eps);
  p = __fadd_rn(p, __fdiv_rn(__fmul_rn(s.negative_step, m), denominator));
}

__global__ void adamw_kernel(const Arguments a, int64_t packs) {
  if (a.step.skip != nullptr && *a.step.skip != 0.0F) return;
  const float multiplier = a.step.multiplier == nullptr ? 1.0F : *a.step.multiplier;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < packs) {
    float p[4], g[4], m[4], v[4];
    load_pack(a.parameter + 4 * i, p);
    load_pack(a.gradient + 4 * i, g);
    load_pack(a.exp_avg + 4 * i, m);
    load_pack(a.exp_avg_sq + 4 * i, v);
#pragma unroll
    for (int j = 0; j < 4; ++j) update(p[j], __fmul_rn(g[j], multiplier), m[j], v[j], a.step);
    store_pack(a.parameter + 4 * i, p);
    store_pack(a.exp_avg + 4 * i, m);
    store_pack(a.exp_avg_sq + 4 * i, v);
  }
  const int64_t single = 4 * packs + i;
  if (single < a.n) {
    float p = a.parameter[single], m = a.exp_avg[single], v = a.exp_avg_sq[single];
    update(p, __fmul_rn(a.gradient[single], multiplier), m, v, a.step);
    a.parameter[single] = p;
    a.exp_avg[single] = m;
    a.exp_avg_sq[single] = v;
  }
}

}  // namespace

cudaError_t adamw(float* parameter, const float* gradient, float* exp_avg, float* exp_avg_sq, int64_t n, const AdamWStep& step,
                  Stream stream) {
  if (n == 0) return cudaSuccess;
  const bool whole = aligned(parameter) && aligned(gradient) && aligned(exp_avg) && aligned(exp_avg_sq);
  const int64_t packs = whole ? n / 4 : 0;
  const int64_t items = std::max(packs, n - 4 * packs);
  const auto grid = static_cast<unsigned>((items + kThreads - 1) / kThreads);
  adamw_kernel<<<grid, kThreads, 0, stream>>>({parameter, gradient, exp_avg, exp_avg_sq, n, step}, packs);
  return cudaGetLastError();
}

}  // namespace qlorapp::cuda
