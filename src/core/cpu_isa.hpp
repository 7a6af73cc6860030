// SPDX-License-Identifier: Apache-2.0
/// Which instruction set the CPU kernels use, chosen when the program runs. Torch-free.
///
/// Kernels exist once per set, compiled with that set's flags. All quantize and dequantize to the same bits; sums of products are
/// rounded in each set's own order.
#pragma once

#include <cstdint>
#include <string_view>

namespace qlorapp {

enum class CpuIsa : uint8_t {
  kScalar,      ///< What the compiler's baseline has; every machine.
  kAvx2,        ///< AVX2 with FMA and F16C.
  kAvx512,      ///< AVX-512 F, BW, DQ, VL.
  kAvx512Bf16,  ///< The same with dot products of bfloat16.
};

/// The best set that this processor has.
[[nodiscard]] CpuIsa best_cpu_isa();

/// The set in use: the best one, unless the environment variable QLORAPP_CPU_ISA (scalar, avx2, avx512, avx512_bf16; read once) or
/// set_cpu_isa asked for less.
[[nodiscard]] CpuIsa cpu_isa();

/// For tests and benchmarks. More than best_cpu_isa() is lowered to it. Not for use while kernels run.
void set_cpu_isa(CpuIsa isa);

[[nodiscard]] std::string_view to_string(CpuIsa isa);

}  // namespace qlorapp
