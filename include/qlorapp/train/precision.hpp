// SPDX-License-Identifier: Apache-2.0
/// Which number format a device should train in.
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <string_view>

namespace qlorapp {

enum class Precision : uint8_t {
  kFp32,  ///< "no" mixed precision.
  kBf16,  ///< fp32's exponent range: no loss scaling.
  kFp16,  ///< Needs GradScaler.
};

/// @returns "no", "bf16" or "fp16": the names that accelerate and the lesson use.
[[nodiscard]] std::string_view to_string(Precision precision);

/// A GPU's architecture, ordered as CUDA orders it: 7.5 is Turing (T4), 8.0 Ampere.
struct ComputeCapability {
  int major = 0;
  int minor = 0;
  friend constexpr auto operator<=>(const ComputeCapability&, const ComputeCapability&) = default;
};

/// The best format of a GPU: bf16 from 8.0 (Ampere) on, because its tensor cores have it; fp16 before.
[[nodiscard]] constexpr Precision mixed_precision_for(ComputeCapability gpu) {
  return gpu >= ComputeCapability{8, 0} ? Precision::kBf16 : Precision::kFp16;
}

/// @returns "Tesla T4: Using FP16 with loss scaling" or "<name>: Using BF16 (best)"; empty for fp32, which needs no words.
[[nodiscard]] std::string describe_mixed_precision(std::string_view gpu_name, Precision precision);

}  // namespace qlorapp
