// SPDX-License-Identifier: Apache-2.0
// A warp a block of 256 elements, eight a lane: the moments are decoded, updated and encoded again in registers.
#include <algorithm>

#include "adamw.hpp"
#include "pack.cuh"

namespace qlorapp::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kBlock = 256;
constexpr int kEach = kBlock / 32;
constexpr uint32_t kMagnitude = 0x7fffffffU, kInfinity = 0x7f800000U;

struct Arguments {
  float* parameter;
  const float* gradient;
  uint8_t *state1, *state2;
  float *absmax1, *absmax2;
  int64_t n;
  AdamWStep step;
  const DynamicMapTables* tables;
};

/// Finds the code whose entry is nearest to value / absmax, the lower one on a tie, as src/ops/cpu/adamw_8bit.cpp decides it:
/// by products with the midpoints in double. The quotient in float (within 2^-22) decides alone unless a midpoint lies within
/// 2^-20 of it, which is rare: doubles are slow on most GPUs.
template <int shift>
struct Nearest {
  const float* midpoint;
  const double* exact_midpoint;
  const uint8_t *begin_positive, *begin_negative;
  float inverse;  // 1 / absmax; 0 where that is no good number, and then doubles decide
  float absmax;

  __device__ uint32_t operator()(float value) const {
    constexpr auto first = DynamicMapTables::kLowest >> shift;
    constexpr auto last = DynamicMapTables::kOne >> shift;
    const float quotient = __fmul_rn(value, inverse);
    const uint32_t bits = __float_as_uint(quotient);
    const uint32_t cell = min(max((bits & kMagnitude) >> shift, first), last) - first;
    const uint32_t code = (bits >> 31) != 0 ? begin_negative[cell] : begin_positive[cell];
    const float margin = fabsf(quotient) * 0x1p-20F;
    const float above = midpoint[code + 1];
    if (fabsf(quotient - above) > margin && quotient - midpoint[code] > margin && inverse != 0.0F)
      return code + (quotient > above ? 1U : 0U);
    return exactly(value, code);
  }
  __device__ __noinline__ uint32_t exactly(float value, uint32_t code) const {
    const auto wanted = static_cast<double>(value), scale = static_cast<double>(absmax);
    while (wanted > __dmul_rn(exact_midpoint[code + 1], scale)) ++code;
    while (!(wanted > __dmul_rn(exact_midpoint[code], scale))) --code;
    return code;
  }
};

__device__ inline float inverse_of(float absmax) { return absmax < 1e-30F || absmax > 0x1p125F ? 0.0F : __fdiv_rn(1.0F, absmax); }

__device__ inline uint32_t max_across_warp(uint32_t value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value = max(value, __shfl_xor_sync(0xffffffffU, value, distance));
  return value;
}

/// A lane's eight elements of a block; those at and behind `length` (of the last block) are not touched.
struct Eight {
  float p[kEach], g[kEach];
  uint32_t code1[kEach], code2[kEach];
};

__device__ inline void split_bytes(uint2 raw, uint32_t (&codes)[kEach]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    codes[j] = raw.x >> (8 * j) & 0xffU;
    codes[j + 4] = raw.y >> (8 * j) & 0xffU;
  }
}
__device__ inline uint2 join_bytes(const uint32_t (&codes)[kEach]) {
  uint2 raw{0, 0};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    raw.x |= codes[j] << (8 * j);
    raw.y |= codes[j + 4] << (8 * j);
  }
  return raw;
}
__device__ inline void load_eight(const float* source, float (&values)[kEach]) {
  float half[4];
  load_pack(source, half);
#pragma unroll
  for (int j = 0; j < 4; ++j) values[j] = half[j];
  load_pack(source + 4, half);
#pragma unroll
  for (int j = 0; j < 4; ++j) values[j + 4] = half[j];
}
__device__ inline void store_eight(float* target, const float (&values)[kEach]) {
  const float low[4] = {values[0], values[1], values[2], values[3]}, high[4] = {values[4], values[5], values[6], values[7]};
  store_pack(target, low);
  store_pack(target + 4, high);
}

template <bool whole>
__device__ inline void load(const Arguments& a, int64_t at, int count, uint32_t zero1, Eight& e) {
  if constexpr (whole) {
    load_eight(a.parameter + at, e.p);
    load_eight(a.gradient + at, e.g);
    split_bytes(*reinterpret_cast<const uint2*>(a.state1 + at), e.code1);
    split_bytes(*reinterpret_cast<const uint2*>(a.state2 + at), e.code2);
  } else {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const bool inside = j < count;
      e.p[j] = inside ? a.parameter[at + j] : 0.0F;
      e.g[j] = inside ? a.gradient[at + j] : 0.0F;
      e.code1[j] = inside ? a.state1[at + j] : zero1;
      e.code2[j] = inside ? a.state2[at + j] : 0;
    }
  }
}

template <bool whole>
__device__ inline void store(const Arguments& a, int64_t at, int count, const Eight& e) {
  if constexpr (whole) {
    store_eight(a.parameter + at, e.p);
    *reinterpret_cast<uint2*>(a.state1 + at) = join_bytes(e.code1);
    *reinterpret_cast<uint2*>(a.state2 + at) = join_bytes(e.code2);
  } else {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      if (j >= count) continue;
      a.parameter[at + j] = e.p[j];
      a.state1[at + j] = static_cast<uint8_t>(e.code1[j]);
      a.state2[at + j] = static_cast<uint8_t>(e.code2[j]);
    }
  }
}

template <bool whole>
__device__ inline void step_block(const Arguments& a, int64_t block, float multiplier, const DynamicMapTables::Frequent& t) {
  const AdamWStep& s = a.step;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t at = block * kBlock + lane * kEach;
  const int count = static_cast<int>(max(int64_t{0}, min(static_cast<int64_t>(kEach), a.n - at)));
  constexpr uint32_t kZero1 = 127;  // kSignedZeroCode
  Eight e;
  load<whole>(a, at, count, kZero1, e);
  const float scale1 = a.absmax1[block], scale2 = a.absmax2[block];
  float m[kEach], v[kEach];
  uint32_t largest_m = 0, largest_v = 0, unusable = 0;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const float g = __fmul_rn(e.g[j], multiplier);
    m[j] = __fmaf_rn(s.one_minus_beta1, g, __fmul_rn(__fmul_rn(t.signed_value[e.code1[j]], scale1), s.beta1));
    v[j] = __fmaf_rn(__fmul_rn(s.one_minus_beta2, g), g, __fmul_rn(__fmul_rn(t.unsigned_value[e.code2[j]], scale2), s.beta2));
    e.p[j] = __fadd_rn(__fmul_rn(e.p[j], s.decay),
                       __fdiv_rn(__fmul_rn(s.negative_step, m[j]), __fadd_rn(__fdiv_rn(__fsqrt_rn(v[j]), s.correction2), s.eps)));
    largest_m = max(largest_m, __float_as_uint(m[j]) & kMagnitude);
    largest_v = max(largest_v, __float_as_uint(v[j]));
    unusable |= (__float_as_uint(g) & kMagnitude) >= 0x5f000000U;  // 2^63: a sum of such squares may not be finite
  }
  largest_m = max_across_warp(largest_m);
  largest_v = max_across_warp(largest_v);
  if (__any_sync(0xffffffffU, unusable != 0) || largest_m >= kInfinity || largest_v >= kInfinity) return;
  const float absmax1 = __uint_as_float(largest_m), absmax2 = __uint_as_float(largest_v);
  const Nearest<DynamicMapTables::kSignedShift> nearest1{t.signed_midpoint, a.tables->signed_midpoint, t.signed_begin[0],
                                                         t.signed_begin[1], inverse_of(absmax1),       absmax1};
  const Nearest<DynamicMapTables::kUnsignedShift> nearest2{t.unsigned_midpoint, a.tables->unsigned_midpoint, t.unsigned_begin,
                                                           t.unsigned_begin,    inverse_of(absmax2),         absmax2};
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    e.code1[j] = largest_m == 0 ? kZero1 : nearest1(m[j]);
    e.code2[j] = largest_v == 0 ? 0 : nearest2(v[j]);
  }
  store<whole>(a, at, count, e);
  if (lane == 0) {
    a.absmax1[block] = absmax1;
    a.absmax2[block] = absmax2;
  }
}

template <bool whole>
__global__ void __launch_bounds__(kThreads) adamw_8bit_kernel(const Arguments a) {
  if (a.step.skip != nullptr && *a.step.skip != 0.0F) return;
  __shared__ DynamicMapTables::Frequent tables;
  static_assert(sizeof tables % 16 == 0 && sizeof tables <= 16 * 1024 + 1024);
  const auto* from = reinterpret_cast<const uint4*>(&a.tables->frequent);
  for (unsigned i = threadIdx.x; i < sizeof tables / 16; i += kThreads) reinterpret_cast<uint4*>(&tables)[i] = from[i];
  __syncthreads();
  const float multiplier = a.step.multiplier == nullptr ? 1.0F : *a.step.multiplier;
  const int64_t blocks = (a.n + kBlock - 1) / kBlock;
  constexpr int kWarps = kThreads / 32;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t block = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; block < blocks; block += step) {
    if (whole && (block + 1) * kBlock <= a.n) step_block<true>(a, block, multiplier, tables);
    else step_block<false>(a, block, multiplier, tables);
  }
}

}  // namespace

cudaError_t adamw_8bit(float* parameter, const float* gradient, uint8_t* state1, uint8_t* state2, float* absmax1, float* absmax2,
                       int64_t n, const AdamWStep& step, const DynamicMapTables* tables, Stream stream) {
  if (n == 0) return cudaSuccess;
  int device = 0, processors = 0;
  if (const auto error = cudaGetDevice(&device); error != cudaSuccess) return error;
  if (const auto error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device); error != cudaSuccess)
    return error;
  const Arguments a{parameter, gradient, state1, state2, absmax1, absmax2, n, step, tables};
  const bool whole = aligned(parameter) && aligned(gradient) && aligned(state1) && aligned(state2);
  const int64_t warps = (n + kBlock - 1) / kBlock;
  constexpr int kWarps = kThreads / 32;
  // The tables are read once a block of threads, so there are only as many as run at a time.
  const auto grid = static_cast<unsigned>(std::min<int64_t>((warps + kWarps - 1) / kWarps, 4 * int64_t{processors}));
  if (whole) adamw_8bit_kernel<true><<<grid, kThreads, 0, stream>>>(a);
  else adamw_8bit_kernel<false><<<grid, kThreads, 0, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace qlorapp::cuda
