// SPDX-License-Identifier: Apache-2.0
#include "gradient_norm.hpp"

#include "pack.cuh"
#include "reduce.cuh"

namespace qlorapp::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kFinalThreads = 1024;

/// Of one block: the sum of squares, and whether an element was not finite.
struct Partial {
  float squares;
  int not_finite;
};
static_assert(sizeof(Partial) * kGradientNormBlocks == kGradientNormWorkspace);

__device__ inline void look_at(float g, float inverse, float& squares, int& not_finite) {
  const float value = __fmul_rn(g, inverse);
  not_finite |= (__float_as_uint(value) & 0x7fffffffU) >= 0x7f800000U;
  squares = fmaf(value, value, squares);
}

__global__ void partial_kernel(const float* gradient, int64_t packs, int64_t n, const float* inverse_scale, Partial* partials) {
  const float inverse = inverse_scale == nullptr ? 1.0F : *inverse_scale;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  float squares[4] = {0, 0, 0, 0};
  int not_finite = 0;
#pragma unroll 4
  for (int64_t i = first; i < packs; i += step) {
    float g[4];
    load_pack(gradient + 4 * i, g);
#pragma unroll
    for (int j = 0; j < 4; ++j) look_at(g[j], inverse, squares[j], not_finite);
  }
  for (int64_t i = 4 * packs + first; i < n; i += step) look_at(gradient[i], inverse, squares[0], not_finite);
  const float sum = across_block<Sum>((squares[0] + squares[1]) + (squares[2] + squares[3]), 0.0F);
  not_finite = __syncthreads_or(not_finite);
  if (threadIdx.x == 0) partials[blockIdx.x] = {sum, not_finite};
}

__global__ void final_kernel(const Partial* partials, const float* inverse_scale, float max_norm, float* norm, float* found_inf,
                             float* multiplier) {
  double squares = 0;
  int not_finite = 0;
  for (int64_t i = threadIdx.x; i < kGradientNormBlocks; i += kFinalThreads) {
    squares += static_cast<double>(partials[i].squares);
    not_finite |= partials[i].not_finite;
  }
  squares = across_block<Sum>(squares, 0.0);
  not_finite = __syncthreads_or(not_finite);
  if (threadIdx.x != 0) return;
  const auto total = static_cast<float>(sqrt(squares));
  const float inverse = inverse_scale == nullptr ? 1.0F : *inverse_scale;
  const float ratio = __fdiv_rn(max_norm, __fadd_rn(total, 1e-6F));
  *norm = total;
  *found_inf = not_finite != 0 ? 1.0F : 0.0F;
  *multiplier = max_norm > 0.0F && !(ratio >= 1.0F) ? __fmul_rn(inverse, ratio) : inverse;  // a NaN stays
}

}  // namespace

cudaError_t gradient_norm(const float* gradient, int64_t n, const float* inverse_scale, float max_norm, void* workspace,
                          float* norm, float* found_inf, float* multiplier, Stream stream) {
  auto* partials = static_cast<Partial*>(workspace);
  partial_kernel<<<kGradientNormBlocks, kThreads, 0, stream>>>(gradient, aligned(gradient) ? n / 4 : 0, n, inverse_scale, partials);
  final_kernel<<<1, kFinalThreads, 0, stream>>>(partials, inverse_scale, max_norm, norm, found_inf, multiplier);
  return cudaGetLastError();
}

}  // namespace qlorapp::cuda
