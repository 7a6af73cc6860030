// SPDX-License-Identifier: Apache-2.0
/// AdamW over a flat arena on the GPU, with moments in float or in eight bits: the rule of src/ops/adamw.hpp.
///
/// Roundings. float: those of torch.optim.AdamW(foreach=False, fused=False) on a CPU with FMA, where torch contracts lerp and
/// addcmul but not addcdiv; so the moments are bit-equal to the CPU operator on such a machine, but for tail elements (modulo
/// the vector width) that torch leaves to other code. Parameters too, but for some 4e-5 of them by one ulp: the square root
/// that torch takes from MKL on x86 is not always the nearest, this one is. Eight bits: bit-equal to the CPU operator on every
/// machine — parameters, codes, absmax: both fuse the same products and sums, and the nearest code is decided by the same products in
/// double.
///
/// A step needs nothing from the host: `multiplier` (unscaling and clipping) and `skip` (an overflow was found) are read on the
/// device, where gradient_norm.hpp left them.
#pragma once

#include <cstdint>

#include <driver_types.h>

#include "types.hpp"

namespace qlorapp::cuda {

/// Everything that is the same for all elements, rounded to float by the caller as each operator's CPU implementation does.
struct AdamWStep {
  float beta1, one_minus_beta1, beta2, one_minus_beta2;
  float correction2;  ///< √(1 − β₂ᵗ)
  float eps;
  float negative_step;      ///< −lr / (1 − β₁ᵗ)
  float decay;              ///< 1 − lr·λ; 1 does nothing
  const float* multiplier;  ///< float () on the device: g ← round(g · multiplier) first; null is 1
  const float* skip;        ///< float () on the device: unless it is 0, nothing changes; null never skips
};

/// All float (n). Elements are independent: any split of the arena gives the same bits.
cudaError_t adamw(float* parameter, const float* gradient, float* exp_avg, float* exp_avg_sq, int64_t n, const AdamWStep& step,
                  Stream stream);

/// What adamw_8bit reads beside its arguments: the dynamic maps, and what finds the nearest of their codes.
/// Filled on the host once, copied to every device that steps; 16-byte aligned there.
struct DynamicMapTables {
  static constexpr int kSignedShift = 16, kUnsignedShift = 15;  // 7 or 8 bits of mantissa: a cell holds at most one midpoint
  static constexpr uint32_t kLowest = 0x33800000;               // 2^-24
  static constexpr uint32_t kOne = 0x3f800000;
  static constexpr int kSignedCells = static_cast<int>((kOne >> kSignedShift) - (kLowest >> kSignedShift) + 1);
  static constexpr int kUnsignedCells = static_cast<int>((kOne >> kUnsignedShift) - (kLowest >> kUnsignedShift) + 1);

  /// For every element; blocks of threads keep a copy in shared memory.
  struct alignas(16) Frequent {
    float signed_value[256], unsigned_value[256];
    float signed_midpoint[257], unsigned_midpoint[257];  // [k] lies between entries k − 1 and k; infinities at both ends
    uint8_t signed_begin[2][kSignedCells], unsigned_begin[kUnsignedCells];  // code of a cell's lower end
  } frequent;
  /// Only beside a midpoint: exact.
  double signed_midpoint[257], unsigned_midpoint[257];
};

/// Fills the tables from src/format/dynamic_map.hpp. On the host.
void fill(DynamicMapTables& tables);

/// parameter, gradient float (n); state1, state2 uint8 (n); absmax1, absmax2 float (⌈n / 256⌉).
/// A block of 256 whose new moments would not all be finite (a gradient from 9.2e18 on, a damaged absmax) is left as it was,
/// where the CPU operator refuses the whole step: nothing here can throw.
/// @param tables  on the device.
cudaError_t adamw_8bit(float* parameter, const float* gradient, uint8_t* state1, uint8_t* state2, float* absmax1, float* absmax2,
                       int64_t n, const AdamWStep& step, const DynamicMapTables* tables, Stream stream);

}  // namespace qlorapp::cuda
