// SPDX-License-Identifier: Apache-2.0
/// The instructions that --use_fast_math makes of 1 / x, a * b and fmaxf, by name: bitsandbytes' CUDA build is compiled with
/// it, and bit-equal codes need the same ones. Subnormal numbers count as 0.
#pragma once

namespace qlorapp::cuda {
namespace {

__device__ __forceinline__ float fast_reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
__device__ __forceinline__ float fast_product(float a, float b) {
  float result;
  asm("mul.ftz.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
__device__ __forceinline__ float fast_max(float a, float b) {  // a number wins over NaN
  float result;
  asm("max.ftz.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

}  // namespace
}  // namespace qlorapp::cuda
